"""Requests that most gangs do not need, such as cleanup, probes and stack traces. Imported at the first such request."""

from __future__ import annotations

from distflow.protocol.light_typing import TYPE_CHECKING, Callable, Dict, Union, cast
from distflow.runtime.agent.loop import Loop
from distflow.runtime.agent.watches import Watches
from distflow.runtime.cleanup import cleaning
from distflow.runtime.probes import probing, reachability
from distflow.runtime.wire import Json, OpError

if TYPE_CHECKING:
    from distflow.protocol.names import Operation

__all__ = ["Maintenance"]

_Done = Callable[[Union[Json, OpError]], None]


class Maintenance:
    """Operations of one agent that most gangs do not need. ``done`` gets the result or the error."""

    def __init__(self, loop: Loop, root: str, umask: int, watches: Watches) -> None:
        self._loop = loop
        self._root = root
        self._umask = umask
        self._watches = watches
        self._listeners = reachability.Listeners(loop)

    def do(self, request: Json, done: _Done) -> None:
        """Start the operation of ``request``. Raises ``OpError`` for an unknown one."""
        ops: Dict[Operation, Callable[[Json, _Done], None]] = {
            "survey": self._survey,
            "clean": self._clean,
            "probe": self._probe,
            "run": self._run,
            "listen": self._listen,
            "reach": self._reach,
            "pull": self._pull,
            "stacks": self._stacks,
            "reap": self._reap,
            "recall": self._recall,
            "uninstall": self._uninstall,
            "holders": self._holders,
        }
        op = ops.get(cast("Operation", str(request.get("op"))))
        if op is None:
            raise OpError("bad_request", "unknown operation {!r}".format(request.get("op")))
        op(request, done)

    def _survey(self, _request: Json, done: _Done) -> None:
        self._loop.job(lambda: cleaning.survey(self._root), done)

    def _clean(self, request: Json, done: _Done) -> None:
        if request.get("venv"):
            self._loop.job(lambda: cleaning.remove_venv(self._root, str(request["venv"])), done)
            return
        workflow, keep_output = str(request["workflow"]), bool(request.get("keep_output"))

        def cleaned(result: Union[Json, OpError]) -> None:
            if not isinstance(result, OpError) and not keep_output:
                self._watches.forget_workflow(workflow)
            done(result)

        self._loop.job(lambda: cleaning.clean(self._root, workflow, keep_output), cleaned)

    def _probe(self, request: Json, done: _Done) -> None:
        self._loop.job(probing.probe(self._root, request), done)

    def _run(self, request: Json, done: _Done) -> None:
        self._loop.job(probing.run(self._root, request, self._umask), done)

    def _pull(self, request: Json, done: _Done) -> None:
        from distflow.runtime.guard import command, containers

        launch = {"env": request.get("env") or {}, "path_prepend": request.get("path_prepend") or []}
        env = command.environment(launch, "", self._root)
        container = request["container"]
        self._loop.job(lambda: containers.pull(container, env, self._root, request.get("login")), done)

    def _stacks(self, request: Json, done: _Done) -> None:
        from distflow.runtime.probes import stacks

        self._loop.job(stacks.collect(self._root, request), done)

    def _reap(self, request: Json, done: _Done) -> None:
        from distflow.runtime.cleanup import reaping

        self._loop.job(lambda: reaping.reap(self._root, request), done)

    def _recall(self, request: Json, done: _Done) -> None:
        self._loop.job(lambda: cleaning.list_unknown_workflows(self._root, request), done)

    def _uninstall(self, request: Json, done: _Done) -> None:
        self._loop.job(lambda: cleaning.uninstall(self._root, request), done)

    def _holders(self, request: Json, done: _Done) -> None:
        from distflow.runtime.leases import node_leases

        lease_dir = str(request["lease_dir"])
        self._loop.job(lambda: node_leases.list_holders(lease_dir), done)

    def _listen(self, request: Json, done: _Done) -> None:
        done(self._listeners.listen(request))

    def _reach(self, request: Json, done: _Done) -> None:
        self._loop.job(reachability.reach(request), done)
