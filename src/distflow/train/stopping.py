"""Being asked to stop: SIGTERM on any rank makes all of them leave the loop after the same step."""

from __future__ import annotations

import signal
from types import FrameType

import torch.distributed as dist

from distflow.train.communication.votes import any_rank

__all__ = ["STOPPED", "listen_for_stop", "stop_requested"]

STOPPED = 128 + signal.SIGTERM
"""The exit code by which a rank says that it stopped because it was asked to: ``sys.exit(STOPPED)``."""

_asked = False
_listening = False


def listen_for_stop() -> None:
    """Take SIGTERM and SIGINT as requests from now on, in place of dying of them. Call it in the main thread."""
    global _listening  # noqa: PLW0603 (a process has one handler)
    if not _listening:
        signal.signal(signal.SIGTERM, _note)
        signal.signal(signal.SIGINT, _note)
        _listening = True


def stop_requested(group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether any rank was asked to stop; all ranks get the same answer.

    A small collective: every rank calls it at the same place, once per step. From the first call on, SIGTERM no longer
    ends the process.
    """
    listen_for_stop()
    return any_rank(_asked, group=group)


def _note(_number: int, _frame: FrameType | None) -> None:
    global _asked  # noqa: PLW0603
    _asked = True
