"""torch's own operators beside eager, as layers: `python -m benchmarks.operators`."""
