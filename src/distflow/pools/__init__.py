"""Pools and their nodes, and the configuration that defines them."""
