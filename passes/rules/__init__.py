"""Rules that split operators along a mesh axis, their registry, and the oracle."""
