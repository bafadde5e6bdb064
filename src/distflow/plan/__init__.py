"""The plan of a workflow: nodes, commands, environments and files. Computed from values, then printed or executed unchanged."""
