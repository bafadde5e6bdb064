"""What runs on a node: the agent and its attempts' pairs of processes (docs/agent-protocol.md).

Standard library only, Python 3.8 or newer, Linux. It is sent as one archive with ``distflow.protocol`` and an empty
``distflow/__init__.py``, and imports nothing else of distflow.
"""
