"""Time that training stands still for checkpoints."""
