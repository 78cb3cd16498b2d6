"""Training over slow links: gradients at every step against local steps and their averages."""
