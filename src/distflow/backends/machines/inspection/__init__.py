"""Queries about running tasks on nodes: stacks and leases; and commands inside tasks."""
