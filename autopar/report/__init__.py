"""Reports of plans: text, HTML pages and traces."""
