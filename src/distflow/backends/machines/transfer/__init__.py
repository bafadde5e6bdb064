"""Files to nodes and from nodes."""
