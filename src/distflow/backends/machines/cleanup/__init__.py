"""Removing what ended workflows left on nodes."""
