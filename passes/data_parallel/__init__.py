"""Data parallelism as a partition: a graph of the whole batch becomes that of one slice of it."""
