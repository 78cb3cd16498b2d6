"""Values of tensors that Python may read during a trace."""
