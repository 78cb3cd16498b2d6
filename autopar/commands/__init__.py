"""The commands of `autopar` that need more than a few lines: each module adds one to the parser."""
