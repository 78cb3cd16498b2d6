"""Published training runs, modelled from configuration alone by the planner and its cost model."""
