"""Exactness of plans: `parity` of fixed setups, and random `pairs` of plans."""
