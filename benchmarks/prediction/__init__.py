"""Predictions of the cost model beside measurements: `python -m benchmarks.prediction`."""
