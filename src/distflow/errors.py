"""The whole error tree, and the exit code of each family.

::

    DistflowError                      exit  what happened
    ├── InputError                      2    a document or the command line is wrong
    │   ├── ProblemsFound               2    findings with file:line (documents.problems)
    │   └── NotFound                    2    a workflow, task, pool or node of that name does not exist
    ├── NodeError                       3    something between us and a node
    │   ├── TransportError              3    carrying a command or bytes there
    │   │   ├── NodeUnreachable         3    no connection, or it broke
    │   │   │   ├── HostKeyUnknown      3    known_hosts says nothing of the host: trying again does not help
    │   │   │   ├── HostKeyMismatch     3    its key is another one than known_hosts says, or revoked
    │   │   │   └── AuthenticationRefused 3  it accepts none of the keys
    │   │   └── BootstrapFailed         3    connected, but our runtime does not come up
    │   └── AgentError                  3    the node's agent refused a request
    ├── StorageError                    3    something between us and data at a URL, or with the files here
    │   ├── StorageUnreachable          3    no connection to the store, or it broke
    │   ├── StorageRefused              3    the store knows us not, or forbids it: trying again does not help
    │   └── StorageMissing              3    there is no such bucket, object or file
    ├── SupervisorError                 3    the background process did not start
    ├── StateError                      5    this machine's state directory cannot be used
    │   ├── StoreTooNew                 5    written by a newer distflow
    │   ├── RecordUnreadable            5    of one workflow, by another version of distflow
    │   └── StoreBroken                 5    damaged: SQLite cannot read it
    ├── WaitTimeout                     3    a workflow has not ended within the time that was given
    └── WorkflowEnded                   1    the workflow ended and did not complete

Errors say what happened, where, and what to do; the command line prints them as they are (``cli.app``). Anything that is not a
``DistflowError`` is a bug in distflow and ends with exit code 70.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "AgentError",
    "AuthenticationRefused",
    "BootstrapFailed",
    "DistflowError",
    "HostKeyMismatch",
    "HostKeyUnknown",
    "InputError",
    "NodeError",
    "NodeUnreachable",
    "NotFound",
    "RecordUnreadable",
    "StateError",
    "StorageError",
    "StorageMissing",
    "StorageRefused",
    "StorageUnreachable",
    "StoreBroken",
    "StoreTooNew",
    "SupervisorError",
    "TransportError",
    "WaitTimeout",
    "WorkflowEnded",
]


class DistflowError(Exception):
    """Root of everything distflow raises on purpose."""

    exit_code: int = 70
    """What the process ends with when this reaches the command line."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Say what happened in ``message`` and what to do about it in ``hint``."""
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return message and hint, as a person should read them."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class InputError(DistflowError):
    """A document, the configuration or the command line is wrong; nothing was started."""

    exit_code = 2


class NotFound(InputError):
    """There is no such workflow, task, pool or node."""


class NodeError(DistflowError):
    """Something between us and a node, or on it, failed."""

    exit_code = 3

    def __init__(self, node: str, message: str, *, hint: str = "") -> None:
        """Name the ``node`` in front of the message."""
        super().__init__(f"{node}: {message}", hint=hint)
        self.node = node
        self.detail = message
        """The message without the node, for where that is named already."""


class TransportError(NodeError):
    """A command or bytes could not be carried to a node."""


class NodeUnreachable(TransportError):
    """No connection to the node could be made, or it broke."""


class HostKeyUnknown(NodeUnreachable):
    """Nothing is known of the host's key; a person must compare it once, so trying again does not help."""


class HostKeyMismatch(NodeUnreachable):
    """The host showed a revoked key, or one that differs from the known key; a retry does not help."""


class AuthenticationRefused(NodeUnreachable):
    """The host accepts none of the keys that there are; trying again does not help."""


class BootstrapFailed(TransportError):
    """The node was reached, but distflow's runtime did not come up there: because of its ``python``, or of its ``root``."""

    def __init__(self, node: str, detail: str, *, hint: str = "", about: Literal["python", "root"] = "python") -> None:
        """Keep ``about``, so that a check can name the setting."""
        super().__init__(node, detail, hint=hint)
        self.about: Literal["python", "root"] = about


class AgentError(NodeError):
    """The node's agent refused a request; ``kind`` is one of the words of the agent protocol."""

    def __init__(self, node: str, kind: str, message: str, *, hint: str = "") -> None:
        """Keep ``kind`` apart from the message, because callers decide by it."""
        super().__init__(node, message, hint=hint)
        self.kind = kind


class StorageError(DistflowError):
    """Something between us and data at a URL failed, or it cannot be kept here."""

    exit_code = 3


class StorageUnreachable(StorageError):
    """No connection to the store could be made, or it broke; trying again may help."""


class StorageRefused(StorageError):
    """The store does not know who asks, or does not allow it; trying again does not help."""


class StorageMissing(StorageError):
    """There is no such bucket, object or file."""


class SupervisorError(DistflowError):
    """The background process that supervises workflows did not start."""

    exit_code = 3


class StateError(DistflowError):
    """This machine's state directory cannot be used."""

    exit_code = 5


class StoreTooNew(StateError):
    """The store was written by a newer distflow than this one."""


class RecordUnreadable(StateError):
    """A record in the store makes no sense to this version of distflow."""


class StoreBroken(StateError):
    """The store is there and SQLite cannot make sense of what is in it."""


class WorkflowEnded(DistflowError):
    """The workflow ended and did not complete; raised by commands that were asked to say so."""

    exit_code = 1


class WaitTimeout(DistflowError):
    """A workflow has not ended within the given time. It continues to run."""

    exit_code = 3
