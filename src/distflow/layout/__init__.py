"""Rank layouts: the ranks that a spec claims, whether they add up, and the nodes that take the tasks. Pure."""
