"""Specs written for users: from a command line, from options of `init`, and from scripts for Slurm."""
