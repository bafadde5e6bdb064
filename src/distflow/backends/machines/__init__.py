"""Plain machines: nodes that a transport reaches (this machine, or SSH), each with an agent on it."""
