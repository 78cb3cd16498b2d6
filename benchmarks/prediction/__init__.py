"""Predictions of the cost model beside what was measured: `python -m benchmarks.prediction`."""
