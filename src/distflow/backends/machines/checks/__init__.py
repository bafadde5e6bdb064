"""Checks of the nodes of a pool: measurements, and findings about them."""
