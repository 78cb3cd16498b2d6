"""How each operator may be split along a mesh axis: rules, their table, and the oracle."""
