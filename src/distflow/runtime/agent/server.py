"""The agent: carries out the requests of one connection on a node (docs/agent-protocol.md), and exits when the connection ends.

It has no state that must outlive it. The state of attempts is in their files and in their pairs (a runner and a keeper each).
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time

from distflow.protocol.light_typing import TYPE_CHECKING, Callable, Dict, List, Optional, Union, cast
from distflow.runtime import processes
from distflow.runtime.agent.log_streams import LogStreams
from distflow.runtime.agent.loop import Loop
from distflow.runtime.agent.watches import Watch, Watches
from distflow.runtime.cleanup import orphans
from distflow.runtime.clock import now
from distflow.runtime.files import attempt_files, attempts, blobs, log_files, records
from distflow.runtime.guard import command
from distflow.runtime.leases.lease_files import lease_directory_id
from distflow.runtime.probes import facts
from distflow.runtime.wire import Json, LineReader, OpError, OutQueue, encode

if TYPE_CHECKING:
    from distflow.protocol.names import Operation
    from distflow.runtime.agent.maintenance import Maintenance

__all__ = ["serve"]

_IDLE_S = 30.0
_MAX_BULK = 128 * 1024
_MAX_TEXT = 500
_LOCK_S = 0.05
_LOCK_TRIES = 1200


def serve(root: str, umask: int) -> None:
    """Serve the connection on standard input and output until it ends or the supervisor stays silent. Does not return.

    ``umask`` is the umask of the login, which commands get.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    os.set_inheritable(incoming, False)
    os.set_inheritable(outgoing, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # accidental prints must not appear between messages
    os.close(null)
    for fd in (incoming, outgoing):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    processes.rename_self("df-agent")
    processes.hide_memory()  # applies to forked pairs too, which hold secrets longer than the agent
    processes.adopt_orphans()
    processes.raise_descriptor_limit()
    _Agent(root, incoming, outgoing, umask).run()
    os._exit(0)  # skips the interpreter's cleanup, which takes time and has nothing to do


class _Answer:
    """The reply to one request, which may be sent later."""

    def __init__(self, agent: _Agent, number: object) -> None:
        self._agent = agent
        self._number = number

    def __call__(self, result: Json) -> None:
        self._agent.send(dict(result, id=self._number, ok=True))

    def refuse(self, error: OpError) -> None:
        self._agent.send({"id": self._number, "ok": False, "error": error.as_json()})

    def reply(self, result: Union[Json, OpError]) -> None:
        """Reply with the result or the error of a job."""
        if isinstance(result, OpError):
            self.refuse(result)
        else:
            self(result)


class _Agent:
    def __init__(self, root: str, incoming: int, outgoing: int, umask: int) -> None:
        self._root = root
        self._incoming = incoming
        self._outgoing = outgoing
        self._umask = umask
        self._loop = Loop()
        self._reader = LineReader()
        self._queue = OutQueue()
        self._idle_s = _IDLE_S
        self._received_at = time.monotonic()
        self._streams = LogStreams(lambda event: self.send(event, bulk=True), lambda: self._queue.bulk_bytes < _MAX_BULK)
        self._watches = Watches(self._loop, root, self.send, self._streams.on_output)
        self._preparing: Dict[str, List[_Answer]] = {}
        self._releasing: Dict[str, List[_Answer]] = {}
        self._loop.watch(incoming, selectors.EVENT_READ, self._read)
        self._loop.later(self._idle_s, self._check_idle)
        self._maintenance: Optional[Maintenance] = None
        self._ops: Dict[Operation, Callable[[Json, _Answer], None]] = {
            "hello": self._hello,
            "ping": self._ping,
            "lease": self._lease,
            "stage": lambda request, answer: answer({"missing": blobs.missing(root, request["blobs"])}),
            "prepare": self._prepare,
            "start": self._start,
            "stop": self._stop,
            "release": self._release,
            "tail": self._tail,
            "untail": self._untail,
            "credit": self._credit,
            "watch": self._watch,
        }

    def run(self) -> None:
        """Serve until the supervisor disconnects or stays silent."""
        self._loop.run()

    # -- the connection

    def send(self, message: Json, bulk: bool = False) -> None:
        """Queue a message."""
        self._queue.put(encode(message), bulk=bulk)
        self._loop.watch(self._outgoing, selectors.EVENT_WRITE, self._write)

    def _write(self, _events: int) -> None:
        try:
            self._queue.write_to(self._outgoing)
        except OSError:
            self._loop.is_over = True
            return
        # The sampler does not notify agents of new samples. Replies to pings come here too, so new samples are found regularly.
        self._streams.pump()
        if not self._queue:
            self._loop.watch(self._outgoing, 0, self._write)

    def _read(self, _events: int) -> None:
        try:
            data = os.read(self._incoming, 262144)
            requests = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, requests = b"", []
        for request in requests:
            self._received_at = time.monotonic()
            self._dispatch(request)
        if not data:
            self._loop.is_over = True

    def _check_idle(self) -> None:
        left = self._received_at + self._idle_s - time.monotonic()
        if left <= 0:
            self._loop.is_over = True
        else:
            self._loop.later(left, self._check_idle)

    def _dispatch(self, request: Json) -> None:
        answer = _Answer(self, request.get("id"))
        op = self._ops.get(cast("Operation", str(request.get("op"))), self._maintain)
        try:
            op(request, answer)
        except attempts.TaskIsLocked as error:  # perhaps by an earlier agent that has not noticed yet that its connection broke
            tries = int(request.get("tries") or 0)
            if tries < _LOCK_TRIES:
                self._loop.later(_LOCK_S, lambda: self._dispatch(dict(request, tries=tries + 1)))
            else:
                answer.refuse(error)
        except OpError as error:
            answer.refuse(error)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            answer.refuse(OpError("bad_request", "a field of the request is missing or has the wrong type: {!r}".format(error)))
        except OSError as error:
            answer.refuse(OpError.from_os(error, "`{}` failed".format(request.get("op"))))
        except Exception as error:  # one request must not end the agent, which serves many attempts
            sys.excepthook(type(error), error, error.__traceback__)
            answer.refuse(OpError("internal", "`{}` failed: {!r}".format(request.get("op"), error)[:_MAX_TEXT]))

    # -- operations

    def _hello(self, request: Json, answer: _Answer) -> None:
        if request.get("idle_timeout_s"):
            self._idle_s = float(request["idle_timeout_s"])
            self._check_idle()
        lease_dir, pid = str(request.get("lease_dir") or ""), os.getpid()

        def gather() -> Json:  # perhaps in a child, whose id is not the agent's
            return {"facts": dict(facts.gather_facts(self._root), machine=lease_directory_id(lease_dir), agent_pid=pid)}

        self._watch(request, answer, gather, is_quick=facts.can_gather_in_agent())

    def _watch(self, request: Json, answer: _Answer, gather: Callable[[], Json] = dict, *, is_quick: bool = True) -> None:
        watches = [self._watches.get(attempt) for attempt in request.get("watch") or []]
        absent = [watch.attempt for watch in watches if watch.link is None and self._watches.status(watch)["phase"] == "absent"]

        def work() -> Json:
            for attempt in absent:  # the supervisor relies on these attempts not running
                orphans.settle(self._root, attempt)
            return gather()

        def finish(result: Union[Json, OpError]) -> None:
            statuses = {}
            for watch in watches:
                watch.reported = statuses[watch.attempt] = self._watches.status(watch)
            answer.reply(result if isinstance(result, OpError) else dict(result, attempts=statuses))

        self._loop.job(work, finish, is_quick=is_quick and not absent)

    def _lease(self, request: Json, answer: _Answer) -> None:
        if request.get("gpus") and "users" not in request:
            from distflow.runtime.leases import gpu_users

            def on_gpus(result: Union[Json, OpError]) -> None:
                gpus = {"users": []} if isinstance(result, OpError) else result
                self._dispatch(dict(request, **gpus))

            with_users = not request.get("share_gpus")
            self._loop.job(lambda: gpu_users.read_gpus(with_users), on_gpus, is_quick=facts.can_gather_in_agent())
            return
        attempt = request["attempt"]
        # If the lease was released and is requested again at once, its pair may still be exiting.
        if attempt in self._releasing:
            raise attempts.TaskIsLocked("the previous lease of this attempt is still being released")
        directory = attempts.directory_of(self._root, attempt)
        phase = attempts.read_status(directory)["phase"]
        if phase == "ended":
            raise OpError("conflict", "this attempt has already ended on this node; submit the workflow again")
        if phase != "absent":
            self._watches.get(attempt)
            state = records.read_state(directory) or {}
            answer(_lease_of(state))
            return
        if request.get("venv"):
            from distflow.runtime.files import venvs

            venvs.require(self._root, request["venv"])

        def on_up() -> None:
            state = records.read_state(directory)
            if state is None:
                why = records.read_text(directory, "pair.log").split("\n")[-1] or "they were killed"
                answer.refuse(OpError("internal", "runner and keeper of the attempt did not start: {}".format(why)))
            else:
                answer(_lease_of(state))

        # A reachable pair without a state is just starting. This agent or another one forked it.
        if not attempts.is_reachable(directory):
            self._loop.children.add(attempts.create(self._root, request, self._umask))
        self._watches.expect(attempt, on_up)

    def _prepare(self, request: Json, answer: _Answer) -> None:
        watch = self._known_watch(request)
        launch = command.fill_placeholders(attempt_files.checked(request["launch"]), watch.directory)
        if watch.attempt in self._preparing:
            self._preparing[watch.attempt].append(answer)
            return
        phase = self._watches.status(watch)["phase"]
        if phase != "leased":
            if phase == "ended":
                raise OpError("conflict", "this attempt has ended")
            answer({"prepared": True})
            return
        launch = _activated(self._root, launch)
        lock = attempts.lock_files(watch.directory)
        waiting = self._preparing[watch.attempt] = [answer]

        def finish(result: Union[Json, OpError]) -> None:
            os.close(lock)
            self._preparing.pop(watch.attempt, None)
            for one in waiting:
                one.reply(result)

        def on_placed(result: Union[Json, OpError]) -> None:
            if isinstance(result, OpError):
                finish(result)
                return
            private = {key: value for key, value in launch.items() if key != "files"}
            self._ask(watch, {"op": "prepare", "launch": private}, on_answer)

        def on_answer(result: Optional[Json], error: Optional[OpError]) -> None:
            if result is None and error is None:
                error = OpError("conflict", "this attempt has ended")
            finish(error or {"prepared": True})

        def work() -> Json:
            attempt_files.place(self._root, watch.directory, launch)
            if request.get("memo"):
                attempt_files.write_memo(watch.directory, str(request["memo"]))
            return {}

        self._loop.job(work, on_placed, is_quick=attempt_files.can_place_in_agent(launch))

    def _start(self, request: Json, answer: _Answer) -> None:
        watch = self._known_watch(request)
        if watch.is_unresponsive and self._watches.status(watch)["started_at"] is None:
            # Runner and keeper are either busy for a short time or gone.
            raise attempts.TaskIsLocked("runner and keeper of the attempt do not respond")

        def on_answer(result: Optional[Json], error: Optional[OpError]) -> None:
            if error is not None:
                answer.refuse(error)
                return
            status = result or self._watches.status(watch)
            if status.get("started_at") is None:
                answer.refuse(OpError("conflict", "this attempt ended before it was started"))
            else:
                answer({"started_at": status["started_at"], "pid": status["pid"]})

        self._ask(watch, {"op": "start"}, on_answer)

    def _stop(self, request: Json, answer: _Answer) -> None:
        watch = self._watches.get(request["attempt"])
        grace_s, why = float(request.get("grace_s") or 0), str(request.get("why") or "")
        if watch.link is None and self._watches.status(watch)["phase"] == "absent":
            unknown = _unknown()
            self._loop.job(lambda: orphans.settle(self._root, watch.attempt), lambda _result: answer.refuse(unknown))
            return

        def on_answer(_result: Optional[Json], error: Optional[OpError]) -> None:
            answer.reply(error or {})

        self._watches.note_stop(watch, why)
        if watch.link is None:
            self._watches.stop_by_signal(watch)
        self._ask(watch, {"op": "stop", "grace_s": grace_s, "why": why}, on_answer)
        self._watches.resume_or_kill_suspended(watch, grace_s)

    def _release(self, request: Json, answer: _Answer) -> None:
        watch = self._watches.get(request["attempt"])
        if watch.attempt in self._releasing:
            self._releasing[watch.attempt].append(answer)
            return
        if not os.path.isdir(watch.directory):
            answer({})
            return
        if watch.link is None and self._is_starting(watch):
            self._watches.expect(watch.attempt, lambda: self._dispatch(request))
            return
        watch = self._watches.get(watch.attempt)  # connects to a pair that has started in the meantime
        attempts.write_ticket(watch.attempt, request.get("waits") or {})
        self._watches.end_unreachable(watch)
        self._releasing[watch.attempt] = [answer]

        def finish(result: Union[Json, OpError]) -> None:
            for one in self._releasing.pop(watch.attempt):
                one.reply(result)

        def work() -> Json:
            attempts.remove(watch.directory)
            return {}

        def remove() -> None:
            if self._watches.status(watch)["started_at"] is not None:
                finish(OpError("conflict", "the attempt has run, so it cannot be released; `clean` removes it"))
                return
            self._watches.forget(watch.attempt)
            self._loop.job(work, finish)

        def on_answer(_result: Optional[Json], error: Optional[OpError]) -> None:
            if error is not None:
                finish(error)
            elif watch.link is None and not attempts.is_reachable(watch.directory):
                remove()
            else:
                watch.on_gone.append(remove)

        self._ask(watch, {"op": "release"}, on_answer)
        self._watches.resume_or_kill_suspended(watch, 0.0)

    def _tail(self, request: Json, answer: _Answer) -> None:
        watch = self._known_watch(request)
        name, offset = str(request["file"]), int(request.get("offset") or 0)
        if not log_files.is_output(name):
            raise OpError(
                "bad_request",
                "`file` must be `output.log`, `output.idx`, `output.samples` or a later part "
                "(`output-<offset>-<lines>.log` or `.idx`), not {!r}".format(name),
            )
        has_ended = self._watches.status(watch)["phase"] == "ended"
        answer({})
        self._streams.add(int(request["stream"]), watch.attempt, watch.directory, name, offset, has_ended)

    def _untail(self, request: Json, answer: _Answer) -> None:
        self._streams.remove(int(request["stream"]))
        answer({})

    def _ping(self, _request: Json, answer: _Answer) -> None:
        answer({"now": now()})
        self._watches.report_heartbeats()

    def _credit(self, request: Json, answer: _Answer) -> None:
        self._streams.credit(int(request["stream"]), int(request["bytes"]))
        if request.get("id") is not None:
            answer({})

    def _maintain(self, request: Json, answer: _Answer) -> None:
        if self._maintenance is None:
            # Most gangs do not need this module, and every import delays every start.
            from distflow.runtime.agent.maintenance import Maintenance

            self._maintenance = Maintenance(self._loop, self._root, self._umask, self._watches)
        self._maintenance.do(request, answer.reply)

    # -- helpers

    def _known_watch(self, request: Json) -> Watch:
        watch = self._watches.get(request["attempt"])
        if self._watches.status(watch)["phase"] == "absent":
            raise _unknown()
        return self._watches.get(watch.attempt)  # connects to a pair that has come up in between

    def _is_starting(self, watch: Watch) -> bool:
        """Return whether the attempt has a pair that has not written its state yet."""
        return self._watches.status(watch)["phase"] == "absent" and attempts.is_reachable(watch.directory)

    def _ask(self, watch: Watch, request: Json, on_answer: Callable[[Optional[Json], Optional[OpError]], None]) -> None:
        """Send a request to the pair. ``on_answer`` gets the result or the error; neither without a connection to the pair."""
        if watch.link is None:
            on_answer(None, None)
        else:
            watch.link.ask(request, on_answer)


def _unknown() -> OpError:
    return OpError("not_found", "this attempt is not on this node")


def _activated(root: str, launch: Json) -> Json:
    """Return the launch with its Python environment, if it has one. Raises ``OpError``."""
    if not launch.get("venv"):
        return launch
    from distflow.runtime.files import venvs

    return venvs.activated(root, launch)


def _lease_of(state: Json) -> Json:
    return {name: state.get(name) for name in ("gpu_ids", "port", "link_port")}
