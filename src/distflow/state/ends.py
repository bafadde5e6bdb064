"""How attempts ended, and which end was the first cause of a group's failure: frozen records."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.states import Reason
from distflow.protocol.ends import EndReason

__all__ = ["Cause", "End", "RankText"]


class RankText(str):
    """The text of a line that is known to be a rank's."""

    __slots__ = ("rank",)

    rank: int

    @classmethod
    def of(cls, text: str, rank: int) -> RankText:
        """Return ``text`` as one that ``rank`` printed."""
        made = cls(text)
        made.rank = rank
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an attempt of a task ended, as its node recorded it (``docs/agent-protocol.md``); its times are by our clock."""

    ended_at: float
    reason: EndReason = EndReason.EXITED
    exit_code: int | None = None
    signal: int | None = None
    started_at: float | None = None
    stopped_at: float | None = None
    """When the stop reached it; ``None`` when nobody stopped it."""
    message: str | None = None
    output_bytes: int = 0
    lost_output_bytes: int = 0
    """Bytes of output that the node could not keep, because its disk was full."""
    error: dict[str, object] | None = None
    """torch's error file (``TORCHELASTIC_ERROR_FILE``), when a process of the task wrote one."""
    oom_pid: int | None = None
    """The process of it that the kernel killed for want of memory."""
    kernel: tuple[str, ...] = ()
    """What the kernel said of that, and of errors of its GPUs (``NVRM: Xid``) while it ran."""
    clock: Clock | None = None
    """How far the node's clock was from ours, which the times were corrected by; ``None`` where nobody measured it."""

    @property
    def is_success(self) -> bool:
        """True when the command itself said so."""
        return self.reason is EndReason.EXITED and self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The first cause of a group's failure."""

    task: str
    reason: Reason
    message: str
    """One sentence, such as ``exit code 1``."""
    at: float
    node: str | None = None
    ranks: str = ""
    """The rank that failed where it is known, else all ranks of the task."""
    pid: int | None = None
    """The process that failed where it is known, else the task's command."""
    exit_code: int | None = None
    signal: int | None = None
    rank_signal: int | None = None
    """The signal that ended the rank that failed first, where a launcher reports it; the command then has an exit code."""
    clock: Clock | None = None
    """How sure ``at`` is, between nodes; ``None`` where nobody measured it."""
    rivals: tuple[str, ...] = ()
    """Tasks that failed by themselves too, so close to it that the clocks do not tell which was first."""
    lines: tuple[str, ...] = ()
    """The last lines that the task printed."""
    traceback: str = ""
    """Of Python, from torch's error file."""
    kernel: tuple[str, ...] = ()
    """What the kernel said: a process that it killed for want of memory, errors of GPUs while the task ran."""
