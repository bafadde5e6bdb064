"""The node runtime: the agent, other services, and the processes of attempts (docs/agent-protocol.md).

It uses only the standard library and needs Python 3.8 or newer and Linux. It is sent in an archive with ``distflow.protocol``
and an empty ``distflow/__init__.py``, and imports nothing else of distflow. The submitting machine also uses some modules.
"""
