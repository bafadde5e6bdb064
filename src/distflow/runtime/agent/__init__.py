"""The agent: it speaks for the node over one connection and serves the supervisor's requests."""
