"""Errors of distflow, and the exit code of each family.

::

    DistflowError                      exit  what happened
    ├── InputError                      2    a document or the command line is wrong, or the request does not fit the status
    │   ├── ProblemsFound               2    findings with file:line (documents.problems)
    │   ├── SecretsMissing              2    secrets of an earlier workflow must be given again
    │   └── NotFound                    2    a workflow, task, node, file or another named thing does not exist
    ├── NodeError                       3    a node, or the connection to it, failed
    │   ├── TransportError              3    a command or bytes could not be sent to it
    │   │   ├── NodeUnreachable         3    no connection, or it broke
    │   │   │   ├── HostKeyUnknown      3    known_hosts does not have the host: retrying does not help
    │   │   │   ├── HostKeyMismatch     3    the host's key differs from known_hosts, or is revoked
    │   │   │   └── AuthenticationRefused 3  the host accepts none of the user's keys, or there is no usable key
    │   │   └── BootstrapFailed         3    connected, but distflow's runtime does not start
    │   └── AgentError                  3    the node's agent refused a request, or sent an invalid answer
    ├── StorageError                    3    data at a URL, or local files, could not be read or written
    │   ├── StorageUnreachable          3    no connection to the storage service, or it broke
    │   ├── StorageRefused              3    the storage service refuses the credentials or the access: retrying does not help
    │   └── StorageMissing              3    there is no such bucket, object or file
    ├── NotifyError                     3    a notification was not delivered
    ├── SupervisorError                 3    a background process did not start, or an older one did not end
    ├── StateError                      5    the state directory, or data stored in it, cannot be used
    │   ├── StoreTooNew                 5    written by a newer distflow
    │   ├── RecordUnreadable            5    this version of distflow cannot read a workflow's record
    │   └── StoreBroken                 5    damaged: SQLite cannot read it
    ├── WaitTimeout                     3    a workflow has not ended within the time that was given
    └── WorkflowEnded                   1    the workflow ended and did not complete

Messages say what failed, where, and what to do. The command line prints them unchanged, most of them after ``error:``. Usage
errors exit with 2 and Ctrl-C with 130. A full disk exits with 5 if it holds the state directory or temporary files, and with 3
if it is the target of a download (``StorageError``). If the reader of the output exits, as in ``| head``, most commands
exit with 0, and ``submit --wait`` with 4. Any other exception is a bug in distflow, with exit code 70 (``cli.app``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = [
    "AgentError",
    "AuthenticationRefused",
    "BootstrapFailed",
    "DistflowError",
    "HostKeyMismatch",
    "HostKeyUnknown",
    "InputError",
    "InvalidValue",
    "NodeError",
    "NodeUnreachable",
    "NotFound",
    "NotifyError",
    "RecordUnreadable",
    "SecretsMissing",
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
    """Base of the errors that have a message for the user and an exit code."""

    exit_code: int = 70
    """The exit code of the process if the error reaches the command line."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Take the ``message``, which describes the error, and the ``hint``, which describes the remedy."""
        super().__init__(message)
        self.message = message
        self.detail = message
        """The message, without the node's name if it starts with one."""
        self.hint = hint

    def __str__(self) -> str:
        """Return the message and the hint."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class InvalidValue(ValueError):
    """A text or number that cannot be parsed. Callers that know its file and line report it as an ``InputError``."""

    def __init__(self, message: str, hint: str) -> None:
        """Take the ``message``, which describes the error, and the ``hint``, which describes the remedy."""
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


class InputError(DistflowError):
    """A document, the configuration or the command line is wrong, or the request does not fit a workflow's or task's status."""

    exit_code = 2


class NotFound(InputError):
    """Something that a name or a pattern selects does not exist, such as a workflow, a task, a pool, a node or a file."""


class SecretsMissing(InputError):
    """The secrets of a workflow must be given again, because distflow does not use them for another workflow."""

    def __init__(self, workflow: str, names: Sequence[str]) -> None:
        """Set the message from the id of the workflow and the ``names`` of the secrets."""
        super().__init__(
            f"give these secrets of {workflow} again: {', '.join(names)}. distflow does not use the secrets of a workflow for "
            "another one"
        )
        self.names = tuple(names)

    @property
    def options(self) -> str:
        """The options of commands that give the secrets."""
        return " ".join(f"--set-env {name}=…" for name in self.names)


class NodeError(DistflowError):
    """A node, or the connection to it, failed."""

    exit_code = 3

    def __init__(self, node: str, message: str, *, hint: str = "") -> None:
        """Put the name of the ``node`` before the message."""
        super().__init__(f"{node}: {message}", hint=hint)
        self.node = node
        self.detail = message


class TransportError(NodeError):
    """A command or bytes could not be sent to a node."""


class NodeUnreachable(TransportError):
    """No connection to the node could be made, or it broke."""


class HostKeyUnknown(NodeUnreachable):
    """known_hosts does not have the host's key. A person must compare it once; retrying does not help."""


class HostKeyMismatch(NodeUnreachable):
    """The host's key is revoked or differs from the key in known_hosts; retrying does not help."""


class AuthenticationRefused(NodeUnreachable):
    """The host accepts none of the user's keys, or the user has no usable key; retrying does not help."""


class BootstrapFailed(TransportError):
    """The node was reached, but distflow's runtime did not start there."""

    def __init__(self, node: str, detail: str, *, hint: str = "", about: Literal["python", "root"] = "python") -> None:
        """Store ``about``, the setting that is probably wrong, for the report of ``pool check``."""
        super().__init__(node, detail, hint=hint)
        self.about: Literal["python", "root"] = about


class AgentError(NodeError):
    """The node's agent refused a request, or sent an invalid answer. ``kind`` is an error kind of the agent protocol."""

    def __init__(self, node: str, kind: str, message: str, *, hint: str = "") -> None:
        """Store ``kind`` separately from the message, because callers handle an error by its kind."""
        super().__init__(node, message, hint=hint)
        self.kind = kind


class StorageError(DistflowError):
    """Data at a URL, or local files, could not be read or written."""

    exit_code = 3


class StorageUnreachable(StorageError):
    """No connection to the storage service could be made, or it broke. Retrying may help."""


class StorageRefused(StorageError):
    """The storage service refuses the credentials or the access; retrying does not help."""


class StorageMissing(StorageError):
    """There is no such bucket, object or file."""


class NotifyError(DistflowError):
    """A notification was not delivered."""

    exit_code = 3

    def __init__(self, message: str, *, may_retry: bool = False) -> None:
        """Take the ``message``, which must not contain a URL, and whether a later try may succeed."""
        super().__init__(message)
        self.may_retry = may_retry


class SupervisorError(DistflowError):
    """A background process, which supervises workflows or copies files, did not start, or an older one did not end."""

    exit_code = 3


class StateError(DistflowError):
    """This machine's state directory, or data stored in it or in a workflow's record on a node, cannot be used."""

    exit_code = 5


class StoreTooNew(StateError):
    """The store was written by a newer distflow than this one."""


class RecordUnreadable(StateError):
    """This version of distflow cannot read a record in the store."""


class StoreBroken(StateError):
    """SQLite cannot read the store, because it is damaged."""


class WorkflowEnded(DistflowError):
    """The workflow ended and did not complete, or a function on the nodes did not return a usable value on one of its ranks.

    ``Workflow.raise_for_status``, the results of functions and ``submit --wait`` raise this, and so does port forwarding to a
    task that has ended.
    """

    exit_code = 1


class WaitTimeout(DistflowError):
    """A workflow has not ended within the given time. It continues to run."""

    exit_code = 3
