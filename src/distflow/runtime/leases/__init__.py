"""Leases of GPUs, ports, CPUs and memory, shared by all users of the node."""
