"""Importing what is heavy only when it is needed, and no more of it than that."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.transports.ssh import SshTransport

__all__ = ["load_ssh"]


def load_ssh() -> type[SshTransport]:
    """Return the transport over SSH; its first import takes a tenth of a second."""
    # paramiko takes the task runner `invoke` if it is there, for `Match exec` in a configuration that we read ourselves: that
    # is a third of its time.
    hidden = "invoke" not in sys.modules
    if hidden:
        # So that importing it fails.
        sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        from distflow.transports.ssh import SshTransport  # noqa: PLC0415  as above
    finally:
        if hidden:
            del sys.modules["invoke"]
    return SshTransport
