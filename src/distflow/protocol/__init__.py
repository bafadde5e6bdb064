"""Definitions that the supervisor, the nodes and the ranks share: names, end reasons, and the format of error files.

This package is sent to nodes with the node runtime and with ``distflow.train``, so it uses only the standard library of
Python 3.8.
"""
