"""Checks of the nodes of a pool: measurements, and the findings that follow from them."""
