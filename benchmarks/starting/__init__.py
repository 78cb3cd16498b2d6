"""Memory while a model starts: its values made in place, or read from a checkpoint."""
