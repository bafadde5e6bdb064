"""The part of distflow that runs on nodes: the agent, and the processes of attempts (docs/agent-protocol.md).

It uses only the standard library and needs Python 3.8 or newer and Linux. It is sent as one archive with ``distflow.protocol``
and an empty ``distflow/__init__.py``, and imports nothing else of distflow.
"""
