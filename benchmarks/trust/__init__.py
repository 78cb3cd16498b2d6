"""Files that are broken on purpose, and runs that are killed while they save."""
