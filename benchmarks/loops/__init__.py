"""Random training loops around a compiled model, beside the same loops around the plain one."""
