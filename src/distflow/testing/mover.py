"""A mover of data that moves nothing: it keeps what it was asked for, and a test says how each transfer ends."""

from __future__ import annotations

from distflow.backends.base import Backend
from distflow.storage.credentials import Identity
from distflow.supervisor.commands import TransferData
from distflow.supervisor.transfers import Errand

__all__ = ["FakeMover"]


class FakeMover:
    """Keeps the protocol ``distflow.supervisor.transfer_threads.DataMover``."""

    def __init__(self) -> None:
        """Begin nothing."""
        self.begun: list[TransferData] = []
        """The transfers that were begun, in their order."""

    def begin(self, command: TransferData, errand: Errand, backend: Backend | None = None) -> None:  # noqa: ARG002
        """Note the transfer."""
        self.begun.append(command)

    def call_off(self, command: TransferData) -> None:
        """Do nothing: a transfer that was not made needs no end."""

    def identity(self, url: str) -> Identity | None:  # noqa: ARG002
        """Return credentials that every node can use."""
        return Identity(environment={})

    def forget(self, workflow: str) -> None:
        """Do nothing: nothing was left behind."""

    def close(self) -> None:
        """Do nothing."""
