"""What runs on a node: the agent and its attempts' pairs of processes (docs/agent-protocol.md).

Standard library only, Python 3.8 or newer, Linux. It is shipped as one archive beside an empty ``distflow/__init__.py``, so it
imports nothing of distflow but itself.
"""
