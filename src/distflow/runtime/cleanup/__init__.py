"""Removing files and processes of ended workflows from the node."""
