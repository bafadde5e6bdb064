"""Transports, which run commands on one node and transfer bytes. They do not depend on workflows."""
