"""Notifications that are due."""

from __future__ import annotations

from msgspec import Struct

from distflow.documents.notify import Trigger

__all__ = ["Notification"]


class Notification(Struct, frozen=True, kw_only=True):
    """A notification that is due for one entry of ``notify``."""

    workflow: str
    """The workflow's uuid."""
    target: int
    """The position of the entry among those of the workflow, counted from 0."""
    on: Trigger
    subject: str = ""
    """For ``waiting``: the group and its attempt, such as ``train/0``."""
    at: float
    """The time at which it became due."""

    @property
    def id(self) -> str:
        """A text that identifies the notification, the same for each attempt to send it."""
        return "/".join(filter(None, (self.workflow, str(self.target), self.on.value, self.subject)))
