"""Pools and their nodes, and the configuration that names them. Knows nothing of workflow specs."""
