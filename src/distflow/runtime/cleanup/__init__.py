"""Removing what ended workflows left on the node."""
