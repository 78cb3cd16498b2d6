"""Seconds and memory of calls in new shapes."""
