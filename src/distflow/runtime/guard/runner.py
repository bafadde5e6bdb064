"""The runner: the outer process of the pair. It waits for the keeper, and does its last duties when that was killed."""

from __future__ import annotations

import mmap
import os
import signal
import sys
from typing import NoReturn

from distflow.protocol.ends import EndReason
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import masking, records, secret_files
from distflow.runtime.guard import cgroups, keeper, rank_pipes
from distflow.runtime.guard.attempt_handles import AttemptHandles
from distflow.runtime.guard.exit_words import as_exit, tell
from distflow.runtime.guard.kill_tree import TreeKiller
from distflow.runtime.guard.output import Output
from distflow.runtime.wire import Json

__all__ = ["fork_pair"]


def fork_pair(grip: AttemptHandles) -> int:
    """Fork the pair. Returns the runner's id; the caller then closes its copies of the grip's descriptors.

    Forked, not exec'd: measured over 64 nodes, an interpreter's start for each attempt makes a gang slower than pdsh.
    """
    # No handler of the agent's may run in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run(grip)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run(grip: AttemptHandles) -> NoReturn:
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd, target in ((null, 0), (null, 1), (grip.errors, 2)):
            os.dup2(fd, target)
        processes.close_all_but(grip.descriptors())
        processes.rename_self("df-runner")
        processes.adopt_orphans()
        output_read, output_write = os.pipe()
        os.set_blocking(output_read, False)
        shared = masking.memory()
        runner = os.getpid()
        keeper_pid = os.fork()
        if keeper_pid == 0:
            keeper.run(grip, runner, output_read, output_write, shared)
        os.close(output_write)
        _guard(grip, keeper_pid, output_read, shared)
        code = 0
    except BaseException as error:  # nothing may unwind into the agent's code in this process
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _guard(grip: AttemptHandles, keeper_pid: int, output_read: int, shared: mmap.mmap) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # What TERM means for an attempt is the keeper's to decide (it stops the command and records that).
    signal.signal(signal.SIGTERM, lambda *_: os.kill(keeper_pid, signal.SIGTERM))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
    # Its id is its own until it is reaped: whenever TERM comes, nobody else gets it, and nothing is raised.
    os.waitid(os.P_PID, keeper_pid, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = os.waitpid(keeper_pid, 0)[1]
    if records.read_end(grip.directory) is not None:
        return
    _take_over(grip, keeper_pid, status, output_read, shared)


def _take_over(grip: AttemptHandles, keeper_pid: int, keeper_status: int, output_read: int, shared: mmap.mmap) -> None:
    """End what the keeper left, which is ours now, and record it."""
    state: Json = records.read_state(grip.directory) or {}
    spawned = state.get("command") or {}
    command = spawned.get("pid", 0)
    known: Json = dict(state.get("exit") or {})
    output = Output(grip.dir_fd, grip.log, grip.stamps, int(state.get("lost_output_bytes") or 0))
    output.limit(state.get("max_log"))
    output.add(output_read)
    output.add_ranks(rank_pipes.reopen(grip.directory))  # before ranks end: with its last process a pipe loses what is in it
    trouble = None
    if state.get("container"):
        from distflow.runtime.guard import containers

        trouble = containers.remove(state["container"])
    me = os.getpid()
    hunt = TreeKiller(lambda everything: processes.only_descendants(everything, me), lambda one: processes.is_below(one, me))
    while True:
        ended, are_left = processes.reap()
        for pid, status in ended:
            if pid == command:
                known = dict(as_exit(status), ended_at=now())
        if not are_left or hunt.is_over:
            break
        hunt.step()
        signal.sigtimedwait({signal.SIGCHLD}, hunt.pause_s)
    cgroups.remove(spawned)
    mask = masking.read_shared(shared)
    output.mask(mask)
    output.drain()
    secret_files.remove(grip.directory)
    grip.unlock()
    known.update(output_bytes=output.size, lost_output_bytes=output.lost, error=records.read_error(grip.directory, mask))
    from distflow.runtime.guard import kernel_log

    ended_at, pids = known.get("ended_at") or now(), {command, keeper_pid}
    known["kernel"] = kernel_log.ask(state.get("started_at"), ended_at, pids, is_killed=False, other_gpus=grip.other_gpus)
    known["message"] = hunt.message or trouble or "the process that keeps the task {}".format(tell(keeper_status))
    end = records.make_end(state, records.stop_reason(state) or EndReason.KEEPER_DIED, **known)
    os.fsync(records.write_end(grip.dir_fd, grip.record, end))
