"""Importing what is heavy only when it is needed, and no more of it than that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.transports.ssh import SshTransport
    from distflow.transports.sshlink import SshLink

__all__ = ["load_link", "load_ssh"]


def load_ssh() -> type[SshTransport]:
    """Return the transport over SSH; its first import takes a tenth of a second."""
    with _without_invoke():
        from distflow.transports.ssh import SshTransport  # noqa: PLC0415  as above
    return SshTransport


def load_link() -> type[SshLink]:
    """Return the bare connection over SSH, for who wants no node."""
    with _without_invoke():
        from distflow.transports.sshlink import SshLink  # noqa: PLC0415  as above
    return SshLink


@contextmanager
def _without_invoke() -> Iterator[None]:
    # paramiko takes the task runner `invoke` if it is there, for `Match exec` in a configuration that we read ourselves: that
    # is a third of its time.
    hidden = "invoke" not in sys.modules
    if hidden:
        # So that importing it fails.
        sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop("invoke", None)  # another thread may have hidden it at the same moment
