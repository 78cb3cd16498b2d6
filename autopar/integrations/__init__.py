"""Training loops of other libraries under a plan; each module needs the extra of its name."""
