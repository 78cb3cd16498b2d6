"""Regret of the chosen plan over the best of all: `python -m benchmarks.regret`."""
