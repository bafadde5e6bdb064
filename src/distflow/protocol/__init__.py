"""What the supervisor, the nodes and the ranks must agree on: names, end reasons, and the format of error files.

It travels with the node runtime and with ``distflow.train``, so it uses only the standard library of Python 3.8.
"""
