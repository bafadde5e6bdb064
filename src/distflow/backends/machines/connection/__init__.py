"""The connection to a node: its start, its protocol, and reconnecting."""
