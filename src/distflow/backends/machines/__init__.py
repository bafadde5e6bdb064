"""Plain machines: nodes behind a transport (this machine, or SSH), each with an agent."""
