"""Subcommands of `autopar`: each module adds one to the parser."""
