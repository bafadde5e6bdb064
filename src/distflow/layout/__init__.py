"""Rank layouts: read the ranks that a spec claims, check that they add up, and place tasks on nodes. Nothing here does I/O."""
