"""Checkpoints that are complete or absent, written and read by all ranks together."""
