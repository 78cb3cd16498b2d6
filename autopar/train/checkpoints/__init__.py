"""Checkpoints of whole training runs: saving beside training, resuming, leaving when told to."""
