"""Measurements of the node and of its processes."""
