"""Nodes that are reached over SSH, with paramiko as the client and OpenSSH as the reader of its configuration."""
