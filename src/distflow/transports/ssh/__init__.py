"""Nodes that are reached over SSH. paramiko is the client, and OpenSSH reads the configuration if it is installed.

paramiko is imported only when it is needed, and without its optional dependency ``invoke``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.transports.ssh.connection import SshConnection
    from distflow.transports.ssh.transport import SshTransport

__all__ = ["load_connection", "load_ssh"]


def load_ssh() -> type[SshTransport]:
    """Return the class of the SSH transport. The first import takes a tenth of a second."""
    with _without_invoke():
        from distflow.transports.ssh.transport import SshTransport  # noqa: PLC0415  as above
    return SshTransport


def load_connection() -> type[SshConnection]:
    """Return the class of an SSH connection, for callers that do not need a transport."""
    with _without_invoke():
        from distflow.transports.ssh.connection import SshConnection  # noqa: PLC0415  as above
    return SshConnection


@contextmanager
def _without_invoke() -> Iterator[None]:
    # paramiko imports the task runner `invoke` for `Match exec`, which OpenSSH handles for distflow. `invoke` takes more than
    # half of the import time (225 of 378 ms with -X importtime on a busy machine).
    hidden = "invoke" not in sys.modules
    if hidden:
        # Makes `import invoke` fail.
        sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop("invoke", None)  # another thread may have hidden it at the same time
