"""Ranks under torchrun's agent: started again after a failure, with the nodes that are there."""
