"""Slurm as a cluster engine: one job for each allocation."""
