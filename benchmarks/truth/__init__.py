"""Distributed training of random models beside one process: `python -m benchmarks.truth`."""
