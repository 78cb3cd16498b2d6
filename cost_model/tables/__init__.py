"""Clusters that ship, as JSON: `Cluster.named`. Made by `benchmarks/tables.py` (487a563)."""
