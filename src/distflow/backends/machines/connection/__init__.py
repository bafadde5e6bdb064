"""The connection to a node: its start, its protocol, its loss and its return."""
