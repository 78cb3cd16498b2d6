"""Plans as pages and timelines."""
