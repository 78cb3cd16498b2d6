"""States of optimizers on storage."""
