"""The agent: it acts for the node on one connection and serves the supervisor's requests."""
