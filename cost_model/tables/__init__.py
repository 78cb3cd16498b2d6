"""Clusters that ship, as JSON: `Cluster.named`. Made by `benchmarks/tables.py` of commit 487a563."""
