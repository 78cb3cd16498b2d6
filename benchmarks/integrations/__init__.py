"""Loops of other libraries under plans, beside the library's own run on one process."""
