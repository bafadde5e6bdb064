"""Data at URLs that was moved for a group: fetched for its tasks, and written of their outputs."""

from __future__ import annotations

from distflow.supervisor.carrying import fetched_for, written_of

__all__ = ["fetched_for", "written_of"]
