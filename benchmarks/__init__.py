"""Measurements of autopar beside its peers; run from a checkout, not installed."""
