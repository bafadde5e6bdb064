"""Frozen records of how attempts ended, and of the first cause of a group's failure."""

from __future__ import annotations

from msgspec import Struct

from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.states import REASON_TEXT, Reason
from distflow.protocol.ends import EndReason

__all__ = ["Cause", "End", "PrintedLine"]


class PrintedLine(str):
    """The text of a line of a task's output."""

    __slots__ = ("rank", "time")

    rank: int | None
    """The rank that printed it; ``None`` if the task's ranks share one output, or if the process was not a rank."""
    time: float | None
    """Seconds since the epoch by the node's clock; ``None`` if it is not known."""

    @classmethod
    def of(cls, text: str, rank: int | None = None, time: float | None = None) -> PrintedLine:
        """Return ``text`` as a line that ``rank`` printed at ``time``."""
        made = cls(text)
        made.rank, made.time = rank, time
        return made


class End(Struct, frozen=True, kw_only=True):
    """The end of an attempt, as its node recorded it (``docs/agent-protocol.md``). Times are by the supervisor's clock."""

    ended_at: float
    reason: EndReason = EndReason.EXITED
    exit_code: int | None = None
    signal: int | None = None
    started_at: float | None = None
    stopped_at: float | None = None
    """When its node began to stop it; ``None`` if it was not stopped."""
    message: str | None = None
    allocation: Reason | None = None
    """Why the cluster engine ended the allocation of its node, if it did."""
    output_bytes: int = 0
    lost_output_bytes: int = 0
    """Bytes of output that the node could not store, because its disk was full or failed."""
    error: dict[str, object] | None = None
    """torch's error file (``TORCHELASTIC_ERROR_FILE``), if a process of the task wrote one."""
    oom_pid: int | None = None
    """The id of a process of the task that the kernel killed for lack of memory."""
    kernel: tuple[str, ...] = ()
    """The kernel's messages about that process, and about errors of the task's GPUs (``NVRM: Xid``) while it ran."""
    clock: Clock | None = None
    """The measured offset of the node's clock, by which the times were corrected; ``None`` if it was not measured."""

    def was_stopped_after(self, at: float) -> bool:
        """Return whether the task was stopped at or after ``at`` (seconds since the epoch by the node's clock)."""
        return self.stopped_at is not None and (self.clock.ours(at) if self.clock else at) <= self.stopped_at

    @property
    def is_success(self) -> bool:
        """Whether the command itself exited with code 0."""
        return self.reason is EndReason.EXITED and self.exit_code == 0


class Cause(Struct, frozen=True, kw_only=True):
    """The first cause of a group's failure."""

    task: str
    reason: Reason
    message: str
    """A short text, such as ``exit code 1``."""
    at: float
    node: str | None = None
    ranks: str = ""
    """The rank that failed if it is known, else all ranks of the task."""
    pid: int | None = None
    """The id of the process that failed if it is known, else of the task's command."""
    exit_code: int | None = None
    signal: int | None = None
    rank_signal: int | None = None
    """The signal that ended the first failed rank, if a launcher reports it; the command then has an exit code."""
    clock: Clock | None = None
    """The measured offset of the node's clock, by which ``at`` was corrected, with its uncertainty; ``None``: not measured."""
    rivals: tuple[str, ...] = ()
    """Tasks that also failed by themselves, so close in time that the clocks cannot order them."""
    lines: tuple[str, ...] = ()
    """The last lines of the task's output, or those of its failed rank if each rank has its own output."""
    traceback: str = ""
    """The Python traceback, from torch's error file or the output."""
    kernel: tuple[str, ...] = ()
    """The kernel's messages: a process that it killed for lack of memory, errors of GPUs while the task ran."""

    @property
    def text(self) -> str:
        """One line for people: ``worker on gpu2, rank 11: exit code 1: ValueError: bad label``."""
        from distflow.documents.text import plain  # noqa: PLC0415  most commands show no cause
        from distflow.layout.ranks import rank_label  # noqa: PLC0415  see above
        from distflow.lifecycle.exits import exit_text  # noqa: PLC0415  see above

        where = f" on {self.node}" if self.node else ""
        ranks = f", {rank_label(self.ranks)}" if self.ranks else ""
        message = plain(self.message) or REASON_TEXT[self.reason]
        how = exit_text(self.exit_code, self.signal)
        if how and self.reason not in (Reason.EXIT_CODE, Reason.SIGNAL):  # otherwise, the message contains it
            message += f" ({how})"
        return f"{self.task}{where}{ranks}: {message}"
