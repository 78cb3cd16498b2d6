"""Data parallelism: the graph of a batch partitioned into the graph of one slice."""
