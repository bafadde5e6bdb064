"""The keeper: the child of the runner, and the parent of the command.

One loop handles requests on the ``control`` socket, the command's output, signals and deadlines. If the command was started,
the keeper exits after the command has ended, no process of the attempt that this user can kill remains, and the record is
written. Requests may be repeated: the keeper answers them from its current state. A repeated ``stop`` can only shorten the
grace period.
"""

from __future__ import annotations

import mmap
import os
import selectors
import signal
import sys
import time

from distflow.protocol.ends import EndReason
from distflow.protocol.light_typing import Callable, NoReturn, Optional, Set
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import attempt_files, masking, records
from distflow.runtime.guard import command, gang_link, process_tree
from distflow.runtime.guard.control import AgentConnections, AttemptHandles
from distflow.runtime.guard.output import OutputPipe, OutputWriter
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.wire import Json, OpError

__all__ = ["run"]


_REMAINING_GRACE_S = 2.0
_NOTIFY_INTERVAL_S = 0.01
_MAX_PAUSE_S = 3600.0
_NEVER = float("inf")
_KILLED_CODE = 128 + signal.SIGKILL
"""Exit code by which a shell reports that its child was killed."""


def run(handles: AttemptHandles, runner: int, output_read: int, output_write: int, shared: mmap.mmap) -> NoReturn:
    """Run the keeper in the process that the runner just forked. Never returns."""
    code = 70
    try:
        keeper = _Keeper(handles, runner, output_read, output_write, shared)
        keeper.serve()
        code = 0
    except BaseException as error:  # this copy of the runner must not continue with the runner's code
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


class _Keeper:
    def __init__(self, handles: AttemptHandles, runner: int, output_read: int, output_write: int, shared: mmap.mmap) -> None:
        self._handles = handles
        self._shared = shared
        self._mask: Optional[masking.Mask] = None
        self._runner = runner
        self._output_write = output_write
        self._selector = selectors.DefaultSelector()
        self._orphaned = False
        self._terminated = False
        self._listen_to_signals()
        processes.rename_self("df-keeper")
        processes.adopt_orphans()
        self._orphaned = not processes.die_with_parent(signal.SIGUSR1, runner)

        self._output = OutputWriter(handles.dir_fd, handles.log, handles.output_index)
        self._launch: Optional[Json] = None
        self._command: Optional[command.Spawned] = None
        self._exit: Optional[Json] = None
        self._reason: Optional[EndReason] = None
        self._message: Optional[str] = None
        self._answer_release: Optional[Callable[[Json], None]] = None
        # first the deadline for the start, later for the next step of a stop
        self._deadline = time.monotonic() + handles.start_timeout_s
        self._killing = False
        self._killed: Set[int] = set()
        self._container: Optional[Json] = None
        self._memory: Optional[process_tree.MemoryLimit] = None
        self._gang: Optional[gang_link.GangLink] = None
        self._notify_at = _NEVER
        self._notified_at = 0.0
        self._attended_at = time.monotonic()
        me = os.getpid()
        self._killer = TreeKiller(
            lambda everything: processes.only_descendants(everything, me), lambda one: processes.is_below(one, me)
        )
        self._state: Json = records.first_state(handles, runner)
        records.write_state(handles.state, self._state)
        handles.sign_locks(runner)
        self._agents = AgentConnections(handles.listener, self._selector, self._on_request)
        self._read_from(self._output.add(output_read))

    def _listen_to_signals(self) -> None:
        read, write = os.pipe()
        for fd in (read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._selector.register(read, selectors.EVENT_READ, lambda: os.read(read, 4096))

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            self._terminated = True

    def serve(self) -> None:
        """Run until the attempt is over, then write the record."""
        while not self._advance():
            was_attended = self._agents.is_any_connected  # during the next wait, which may last an hour
            for key, _ in self._selector.select(self._pause()):
                key.data()
            if time.monotonic() >= min(self._notify_at, self._output.due_at):
                self._output.flush()
                self._notify_of_output()
            if self._memory is not None and time.monotonic() >= self._memory.due_at:
                self._evict(self._memory.check())
            if self._gang is not None and time.monotonic() >= self._gang.due_at:
                self._gang.tick()
            if was_attended or self._agents.is_any_connected:
                self._attended_at = time.monotonic()
            elif time.monotonic() >= self._self_stop_at() and self._reason is None:
                self._stop(float((self._launch or {}).get("stop_grace_s") or 0), "NODE_LOST", EndReason.UNATTENDED)
        self._finish()

    def _pause(self) -> Optional[float]:
        timers = [one.due_at for one in (self._output, self._memory, self._gang) if one is not None]
        until = min(self._deadline, self._notify_at, *timers)
        if self._reason is None and not self._agents.is_any_connected:
            until = min(until, self._self_stop_at())
        if self._killing:
            until = min(until, time.monotonic() + self._killer.pause_s)
        # Limited, because epoll's timeout is limited and a deadline may be far away.
        return None if until == _NEVER else min(max(0.0, until - time.monotonic()), _MAX_PAUSE_S)

    def _self_stop_at(self) -> float:
        """Return the monotonic time at which the task is stopped if no agent connects before; infinite without a limit."""
        limit = (self._launch or {}).get("self_stop_after_s")
        return _NEVER if limit is None or self._command is None else self._attended_at + float(limit)

    # -- one round of the loop

    def _advance(self) -> bool:
        """Handle deadlines and ended processes. Returns whether the attempt is over."""
        self._orphaned = self._orphaned or os.getppid() != self._runner
        if self._orphaned and not self._killing:
            self._reason = self._reason or (EndReason.RUNNER_DIED if self._exit is None else None)
            self._kill()
        if self._terminated:
            self._terminated = False
            grace_s = float((self._launch or {}).get("stop_grace_s") or 0)
            self._stop(grace_s, "its keeper received SIGTERM, as when the node shuts down")
        if self._command is None:
            if time.monotonic() >= self._deadline:
                self._handle_late_start()
            return self._reason is not None
        return self._advance_command(self._command)

    def _handle_late_start(self) -> None:
        """End the attempt if no agent is connected. Otherwise extend the deadline: the agent may still be copying files."""
        if self._agents.is_any_connected and self._reason is None:
            self._deadline = time.monotonic() + self._handles.start_timeout_s
        else:
            self._reason = self._reason or EndReason.START_TIMEOUT

    def _advance_command(self, spawned: command.Spawned) -> bool:
        ended, are_left = processes.reap()
        for pid, status in ended:
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self._killed.add(pid)
            if pid == spawned.pid:
                self._exit = dict(records.as_exit(status), ended_at=now())
                self._note_exec_failure()
                self._change(exit=self._exit)  # the next steps may be slow, and only this process knows how the command ended
                self._note_container_end(self._exit)
                self._report_to_gang(self._exit)
                self._remove_container()
                # The remaining processes get TERM, and are killed after two seconds, or at an earlier deadline of a stop.
                self._deadline = min(self._deadline, time.monotonic() + _REMAINING_GRACE_S)
                if are_left and not self._killing:
                    self._killer.signal(self._killer.find(), signal.SIGTERM)
                    self._killer.signal(self._killer.find(), signal.SIGCONT)
        if not are_left:
            return True
        if time.monotonic() >= self._deadline:
            self._kill()
            self._deadline = _NEVER
        if self._killing:
            self._killer.step()
        return self._killing and self._killer.is_over

    def _evict(self, why: Optional[str]) -> None:
        """Kill a task that uses more memory than it requested, without a grace period: other tasks need the memory."""
        if why is not None and self._reason is None and self._exit is None:
            self._reason, self._message = EndReason.EVICTED, why
            self._memory = None
            self._kill()

    def _note_container_end(self, end: Json) -> None:
        if self._container is not None and self._reason is None:
            from distflow.runtime.guard import containers

            self._reason, why = containers.why_ended(self._container, self._handles.directory, end["exit_code"])
            self._message = why or self._message

    def _report_to_gang(self, end: Json) -> None:
        if self._gang is None or self._launch is None:
            return
        if gang_link.stops_gang(self._launch["gang"], self._reason or EndReason.EXITED, end):
            self._gang.fail(self._message or records.describe_exit(end))

    def _on_gang_failure(self, task: str, why: str) -> None:
        """Stop the command, because another task of the gang failed."""
        # The command may have ended already, without having been reaped yet.
        has_ended = self._command is not None and not processes.is_alive(self._command.pid, self._command.start)
        if self._exit is None and self._reason is None and not has_ended:
            grace_s = float((self._launch or {}).get("gang", {}).get("grace_s") or 0)
            self._stop(grace_s, "PEER_FAILED", EndReason.PEER_FAILED)
            self._message = "stopped because {} failed ({})".format(task, why)

    def _kill(self) -> None:
        self._killing = True
        if self._exit is None:
            self._remove_container()

    def _remove_container(self) -> None:
        """Remove the container, because its processes may not be descendants of the keeper."""
        if self._container is not None:
            from distflow.runtime.guard import containers

            self._message = containers.remove(self._container) or self._message

    def _note_exec_failure(self) -> None:
        """Note the message if the exec failed. Call it once, after the child has ended."""
        spawned, failure = self._command, None
        if spawned is not None:
            failure = command.read_failure(spawned.failure)
        if failure is not None and self._exit is not None and self._reason is None:
            self._reason = EndReason.START_ERROR
            self._message = str(failure.get("message"))
            self._exit.update(exit_code=failure.get("exit_code"), signal=None)

    def _finish(self) -> None:
        self._output.drain()
        self._state["lost_output_bytes"] = self._output.lost
        fields = dict(self._exit or {})
        attempt_files.remove_secrets(self._handles.directory)
        fields.update(output_bytes=self._output.size, error=records.read_error(self._handles.directory, self._mask))
        process_tree.remove_cgroup(self._state["command"] or {})
        fields["kernel"] = self._kernel_entries(fields)
        fields["message"] = self._killer.message or (self._mask.text(self._message or "") if self._mask else self._message)
        fields["all_ended"] = not self._killer.message
        self._await_empty_gpus(fields)
        if self._reason is EndReason.RUNNER_DIED:
            cause = "the task's runner was killed, or failed (see `pair.log` in the attempt's directory on the node)"
            fields["message"] = fields["message"] or cause
        end = records.make_end(self._state, self._reason or EndReason.EXITED, **fields)
        # Release the lease before the end is reported, because the next task may request the GPUs immediately. Otherwise the
        # runner, which exits last, would still hold it.
        self._handles.unlock()
        record = records.write_end(self._handles.dir_fd, self._handles.record, end)
        if self._answer_release is not None:
            self._answer_release({})
        self._agents.notify("status")
        os.fsync(record)
        if self._gang is not None:
            self._gang.finish()

    def _await_empty_gpus(self, fields: Json) -> None:
        """Wait until no process of the attempt is left on its GPUs, or add the remaining ones to the message."""
        if self._handles.gpu_ids and self._command is not None:
            from distflow.runtime.leases import gpu_users

            left = gpu_users.wait_until_empty(self._handles.gpu_ids, self._handles.attempt)
            if left:
                fields["all_ended"] = False
                fields["message"] = "; ".join(filter(None, [fields["message"], "processes left on its GPUs: " + left]))

    def _kernel_entries(self, fields: Json) -> Optional[Json]:
        """Return entries of the kernel's log for a command that failed by itself; None for other ends or without entries."""
        code, number = fields.get("exit_code"), fields.get("signal")
        if self._reason is not None or self._command is None or code == 0:
            return None
        from distflow.runtime.guard import kernel_log

        pids = {self._command.pid} | self._killed | kernel_log.named_pids(self._handles.directory, fields["error"])
        is_killed = number == signal.SIGKILL or code == _KILLED_CODE
        container_id = records.read_text(self._handles.directory, "container.id") if self._container is not None else ""
        return kernel_log.find_entries(
            self._state["started_at"], fields.get("ended_at") or now(), pids, is_killed, container_id, self._handles.other_gpus
        )

    # -- requests

    def _on_request(self, request: Json, answer: Callable[[Json], None]) -> None:
        op = request.get("op")
        if op == "prepare":
            if self._launch is None:  # two agents may send the same request
                self._launch = request["launch"]
                self._mask = masking.share(self._shared, self._launch)
                self._state["max_log"] = self._launch.get("max_log")
                for source in self._output.prepare(self._mask, self._launch, self._handles.directory):
                    self._read_from(source)
                if self._launch.get("gang"):
                    link, selector = self._handles.link, self._selector
                    self._gang = gang_link.GangLink(self._launch["gang"], link, selector, self._on_gang_failure)
                self._change(phase="prepared")
            answer({})
        elif op == "start":
            self._start()
            answer({"started_at": self._state["started_at"], "pid": self._state["command"]["pid"]})
        elif op == "stop":
            self._stop(float(request["grace_s"]), str(request["why"]))
            answer({})
        elif op == "release":
            if self._command is not None:
                raise OpError("conflict", "the attempt has started, so it cannot be released; use `stop`")
            self._reason = self._reason or EndReason.RELEASED
            self._answer_release = answer
        else:
            raise OpError("bad_request", "unknown operation {!r}".format(op))

    def _start(self) -> None:
        if self._command is not None:
            return
        if self._reason is not None:
            raise OpError("conflict", "the attempt ended before it was started ({})".format(self._reason))
        if self._launch is None:
            raise OpError("not_prepared", "`start` was requested before `prepare`")
        handles = self._handles
        if self._launch.get("container"):
            from distflow.runtime.guard import containers

            env = command.environment(self._launch, handles.attempt, handles.directory)
            # This is recorded before the container exists, so that the runner can also remove it.
            self._container = containers.identify(self._launch, handles.attempt, env)
            self._state.update(container=self._container)
        try:
            spawned = command.spawn(self._launch, handles.attempt, handles.directory, self._output_write, handles.umask)
        except OSError as error:
            self._reason = EndReason.START_ERROR
            self._message = "cannot create a process: {}".format(error.strerror)
            raise OpError("internal", self._message) from error
        self._command = spawned
        self._deadline = _NEVER
        if self._launch.get("memory") and self._container is None:
            self._memory = process_tree.MemoryLimit(int(self._launch["memory"]), os.getpid())
        os.close(self._output_write)
        # Drop the rest of the launch: only the command needs its environment now.
        self._launch = {name: self._launch.get(name) for name in ("stop_grace_s", "gang", "self_stop_after_s")}
        self._change(phase="running", started_at=now(), command=spawned.record)
        try:
            os.write(spawned.go, b"g")
        except OSError:
            pass  # the child was killed already; the next round reaps it
        os.close(spawned.go)

    def _stop(self, grace_s: float, why: str, reason: EndReason = EndReason.STOPPED) -> None:
        deadline = time.monotonic() + max(0.0, grace_s)
        if self._command is None:
            self._reason = self._reason or reason
            self._state.update(why=why, stopped_at=now())
            return
        self._deadline = min(self._deadline, deadline)
        if self._exit is not None or self._reason is not None:
            return
        self._reason = reason
        self._change(phase="stopping", stopped_at=now(), stop_reason=reason, why=why)
        for number in (signal.SIGTERM, signal.SIGCONT):
            try:
                os.killpg(self._command.pid, number)
            except (ProcessLookupError, PermissionError):
                break

    def _change(self, **changes: object) -> None:
        self._state.update(changes)
        records.write_state(self._handles.state, self._state)
        self._agents.notify("status")

    # -- output

    def _read_from(self, source: OutputPipe) -> None:
        self._selector.register(source.pipe, selectors.EVENT_READ, lambda: self._read_output(source))

    def _read_output(self, source: OutputPipe) -> None:
        lost, got = self._output.lost, source.pump()
        if got == 0:
            self._selector.unregister(source.pipe)
        if self._output.lost != lost:
            self._state["lost_output_bytes"] = self._output.lost
            records.write_state(self._handles.state, self._state)
            if not lost:
                self._agents.notify("status")
        if got > 0 and self._notify_at == _NEVER:
            # Output after a pause is reported immediately, continuous output at most 100 times a second.
            self._notify_at = max(time.monotonic(), self._notified_at + _NOTIFY_INTERVAL_S)

    def _notify_of_output(self) -> None:
        self._notified_at = time.monotonic()
        self._notify_at = _NEVER
        self._agents.notify("output")
