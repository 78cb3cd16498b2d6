"""Training with activations on storage, held against memory and torch's saved-tensor hooks."""
