"""Gradient communication over an emulated network: `python -m benchmarks.communication`."""
