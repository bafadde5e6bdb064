"""Copies of files to and from running tasks with rsync."""
