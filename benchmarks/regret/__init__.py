"""The time of the plan chosen over the best of all: `python -m benchmarks.regret`."""
