"""The runner: the outer process of the pair (runner and keeper).

It waits for the keeper, and completes the keeper's work if the keeper died early. It also starts the sampler, and
kills it at the end.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys

from distflow.protocol.ends import EndReason
from distflow.protocol.light_typing import NoReturn
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import attempt_files, masking, records
from distflow.runtime.guard import keeper, process_tree, sampler
from distflow.runtime.guard.control import AttemptHandles
from distflow.runtime.guard.output import OutputWriter, open_rank_pipes
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.wire import Json

__all__ = ["fork_pair"]

_SAMPLED_AFTER_S = 1.0


def fork_pair(handles: AttemptHandles) -> int:
    """Fork the pair. Returns the runner's id. The caller then closes its copies of the descriptors.

    The pair runs without an exec: with a new interpreter for each attempt, a gang on 64 nodes started slower than with pdsh.
    """
    # No signal handler of the agent may run in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run(handles)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run(handles: AttemptHandles) -> NoReturn:
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd, target in ((null, 0), (null, 1), (handles.errors, 2)):
            os.dup2(fd, target)
        processes.close_all_but(handles.descriptors())
        processes.rename_self("df-runner")
        processes.adopt_orphans()
        output_read, output_write = os.pipe()
        os.set_blocking(output_read, False)
        shared = masking.memory()
        runner = os.getpid()
        keeper_pid = os.fork()
        if keeper_pid == 0:
            keeper.run(handles, runner, output_read, output_write, shared)
        os.close(output_write)
        _guard(handles, keeper_pid, output_read, shared)
        code = 0
    except BaseException as error:  # this copy of the agent must not continue with the agent's code
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _guard(handles: AttemptHandles, keeper_pid: int, output_read: int, shared: mmap.mmap) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # The keeper decides how to handle TERM: it stops the command and records that.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(keeper_pid, signal.SIGTERM))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
    sampler_pid = None
    # The sampler starts later, so that it delays neither the start of a gang nor a short attempt.
    if signal.sigtimedwait({signal.SIGCHLD}, _SAMPLED_AFTER_S) is None:
        sampler_pid = sampler.fork(handles, keeper_pid, shared)
    # WNOWAIT leaves the dead keeper unreaped, so that a TERM that arrives now is not passed on to a new process with its id.
    os.waitid(os.P_PID, keeper_pid, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = os.waitpid(keeper_pid, 0)[1]
    sampler.end(sampler_pid)
    if records.read_end(handles.directory) is not None:
        return
    _take_over(handles, keeper_pid, status, output_read, shared)


def _take_over(handles: AttemptHandles, keeper_pid: int, keeper_status: int, output_read: int, shared: mmap.mmap) -> None:
    """End the processes that the keeper left, which are now descendants of the runner, and record the end."""
    state: Json = records.read_state(handles.directory) or {}
    spawned = state.get("command") or {}
    command = spawned.get("pid", 0)
    fields: Json = dict(state.get("exit") or {})
    output = OutputWriter(handles.dir_fd, handles.log, handles.output_index, int(state.get("lost_output_bytes") or 0))
    output.limit(state.get("max_log"))
    output.add(output_read)
    # The pipes are opened before the ranks end, because a pipe loses its content when no process has it open.
    output.add_ranks(open_rank_pipes(handles.directory))
    container_error = None
    if state.get("container"):
        from distflow.runtime.guard import containers

        container_error = containers.remove(state["container"])
    me = os.getpid()
    killer = TreeKiller(lambda everything: processes.only_descendants(everything, me), lambda one: processes.is_below(one, me))
    while True:
        ended, are_left = processes.reap()
        for pid, status in ended:
            if pid == command:
                fields = dict(records.as_exit(status), ended_at=now())
        if not are_left or killer.is_over:
            break
        killer.step()
        signal.sigtimedwait({signal.SIGCHLD}, killer.pause_s)
    process_tree.remove_cgroup(spawned)
    mask = masking.read_shared(shared)
    output.mask(mask)
    output.drain()
    attempt_files.remove_secrets(handles.directory)
    handles.unlock()
    fields.update(output_bytes=output.size, lost_output_bytes=output.lost, error=records.read_error(handles.directory, mask))
    from distflow.runtime.guard import kernel_log

    ended_at, pids = fields.get("ended_at") or now(), {command, keeper_pid}
    fields["kernel"] = kernel_log.find_entries(
        state.get("started_at"), ended_at, pids, is_killed=False, other_gpus=handles.other_gpus
    )
    fields["message"] = killer.message or container_error or "the task's keeper {}".format(_describe_status(keeper_status))
    end = records.make_end(state, records.stop_reason(state) or EndReason.KEEPER_DIED, **fields)
    os.fsync(records.write_end(handles.dir_fd, handles.record, end))


def _describe_status(status: int) -> str:
    """Describe a wait status."""
    if os.WIFSIGNALED(status):
        return "was killed by signal {}, perhaps because of a lack of memory, or by a user".format(os.WTERMSIG(status))
    return "ended with exit code {}; see `pair.log` in the attempt's directory on the node".format(os.WEXITSTATUS(status))
