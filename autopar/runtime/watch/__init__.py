"""Watching a run: its step times, its waits, and ranks that hang or lag."""
