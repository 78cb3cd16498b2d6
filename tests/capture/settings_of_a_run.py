"""Variables that a forward reads by the name of this module."""

scale = 1.0
options = {"scale": 1.0}
