"""Clusters that ship, as JSON: `Cluster.named`. Made by `python -m benchmarks.tables`."""
