"""A ``TransferRunner`` that transfers nothing: it records the commands, and a test decides how each transfer ends."""

from __future__ import annotations

from distflow.backends.base import Backend
from distflow.storage.credentials import Identity
from distflow.supervisor.commands import TransferData
from distflow.supervisor.transfers import Transfer

__all__ = ["FakeTransfers"]


class FakeTransfers:
    """Implements the protocol ``distflow.supervisor.transfer_threads.TransferRunner``."""

    def __init__(self) -> None:
        """Start without transfers."""
        self.begun: list[TransferData] = []
        """The transfers that were begun, in order."""

    def begin(self, command: TransferData, transfer: Transfer, backend: Backend | None = None) -> None:  # noqa: ARG002
        """Record the transfer."""
        self.begun.append(command)

    def cancel(self, command: TransferData) -> None:
        """Do nothing: no transfer is running."""

    def identity(self, url: str) -> Identity | None:  # noqa: ARG002
        """Return credentials that every node can use."""
        return Identity(environment={})

    def forget(self, workflow: str) -> None:
        """Do nothing: there are no temporary files."""

    def close(self) -> None:
        """Do nothing."""
