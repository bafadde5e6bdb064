"""Copies between this machine and running tasks, by rsync."""
