"""Local steps: groups of ranks that step apart and average their parameters in rounds."""
