"""Leases of whole gangs: a request for each task goes to its node, and if one is refused, all leases are released."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from distflow.backends.base import Leased, LeaseRefused, LeaseRequest, Sink
from distflow.backends.machines.connection.node_connection import NodeConnection, now
from distflow.documents.quantities import count_text
from distflow.errors import AgentError, DistflowError
from distflow.plan.model import Binding, TaskBinding

__all__ = ["GangLease"]

_NO_VENV = "no_venv"
_TEMPORARY = frozenset({"busy", "unreachable", _NO_VENV})
"""Kinds of refusals after which another try may succeed.

A gang's refusal is temporary if at least one node refuses for such a reason, even if other nodes refuse for good.
"""


class GangLease:
    """A gang's lease request. When all nodes have answered, it is granted or undone."""

    def __init__(self, request: LeaseRequest, connections: Mapping[str, NodeConnection], sink: Sink) -> None:
        self._request = request
        self._connections = connections
        self._sink = sink
        self._lock = threading.Lock()
        self._answers: dict[str, Mapping[str, Any] | DistflowError] = {}

    def begin(self) -> None:
        """Send each task's request to its node. A node that was allocated with too few GPUs counts as refusing."""
        request = self._request
        for task, node in request.nodes.items():
            wanted, granted = request.gpus.get(task, 0), self._connections[node].granted_gpus
            if granted is not None and len(granted) < wanted:
                message = f"it was allocated with {count_text(len(granted), 'GPU')}, and the task needs {wanted}"
                self._answered(task, AgentError(node, "too_few", message))
                continue
            self._connections[node].send(
                "lease",
                partial(self._answered, task),
                attempt=self._request.key(task).name,
                gpus=wanted if granted is None else 0,
                gpu_ids=self._connections[node].gpu_ids,
                wanted=_wanted(request, task, self._connections[node].amounts),
                share_gpus=self._connections[node].node.share_gpus,
                lease_dir=self._connections[node].node.lease_dir,
                port=request.port if task == request.master else None,
                link=self._connections[node].address()[0] if task == request.master and len(request.nodes) > 1 else None,
                start_timeout_s=request.start_timeout_s,
                label=f"{request.workflow_id}/{task}",
                venv=request.venvs.get(task),
            )

    def _answered(self, task: str, answer: Mapping[str, Any] | DistflowError) -> None:
        if isinstance(answer, Mapping):
            answer = _checked(self._request.nodes[task], answer)
        with self._lock:
            self._answers[task] = answer
            if len(self._answers) < len(self._request.nodes):
                return
        refusals = {task: answer for task, answer in self._answers.items() if isinstance(answer, DistflowError)}
        if refusals:
            self._undo(refusals)
        else:
            self._grant()

    def _undo(self, refusals: Mapping[str, DistflowError]) -> None:
        kinds = {answer.kind if isinstance(answer, AgentError) else "unreachable" for answer in refusals.values()}
        is_temporary = bool(kinds & _TEMPORARY)
        without_venv = {
            task: self._request.nodes[task]
            for task, answer in refusals.items()
            if isinstance(answer, AgentError) and answer.kind == _NO_VENV
        }
        keeps_position = is_temporary and not without_venv  # other gangs may use the node while the environment is built
        for task in self._request.nodes:
            refusal = refusals.get(task)
            if not isinstance(refusal, AgentError) or refusal.kind in ("internal", "malformed"):
                # The node granted the lease, or may have granted it although it gave no valid answer or had an internal error.
                key = self._request.key(task)
                self._connections[key.node].release_lease(key, waits=self._waits(task) if keeps_position else None)
        self._sink(
            LeaseRefused(
                at=now(),
                workflow=self._request.workflow,
                group=self._request.group,
                attempt=self._request.attempt,
                nodes={
                    self._request.nodes[task]: answer.message for task, answer in refusals.items() if task not in without_venv
                },
                is_final=not is_temporary,
                without_venv=without_venv,
            )
        )

    def _waits(self, task: str) -> dict[str, Any]:
        """Return the resources that a task still waits for, so that its node keeps the task's position in the queue."""
        connection = self._connections[self._request.nodes[task]]
        wanted = {name: want for name, (want, _) in _wanted(self._request, task, connection.amounts).items()}
        label = f"{self._request.workflow_id}/{task}"
        return {"lease_dir": connection.node.lease_dir, "label": label, "gpus": self._request.gpus.get(task, 0), **wanted}

    def _grant(self) -> None:
        tasks: dict[str, TaskBinding] = {}
        port: int | None = None
        link_port: int | None = None
        for task, node in self._request.nodes.items():
            answer = self._answers[task]
            connection = self._connections[node]
            if isinstance(answer, Mapping):
                address, interface = connection.address()
                granted = connection.granted_gpus
                gpus = answer.get("gpu_ids") or () if granted is None else granted[: self._request.gpus.get(task, 0)]
                tasks[task] = TaskBinding(node=node, address=address, interface=interface, gpu_ids=tuple(gpus))
                if task == self._request.master:
                    port, link_port = answer.get("port"), answer.get("link_port")
        at = now()
        self._sink(
            Leased(
                at=at,
                workflow=self._request.workflow,
                group=self._request.group,
                attempt=self._request.attempt,
                binding=Binding(tasks=tasks, port=port, link_port=link_port, leased_at=at),
            )
        )
        # Watch them only now, because the supervisor ignores reports about attempts without a lease.
        for task, node in self._request.nodes.items():
            self._connections[node].watch(self._request.key(task))


def _wanted(request: LeaseRequest, task: str, total: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return resource → (requested amount, ``total`` amount of the node), for the requested resources that the node counts."""
    requested = {"cpus": request.cpus.get(task, 0), "memory": request.memory.get(task, 0)}
    return {name: (want, total[name]) for name, want in requested.items() if want and name in total}


def _checked(node: str, answer: Mapping[str, Any]) -> Mapping[str, Any] | AgentError:
    """Return the answer, or an error if its GPUs or ports are invalid."""
    gpus, ports = answer.get("gpu_ids") or [], [answer.get("port"), answer.get("link_port")]
    is_valid = isinstance(gpus, list) and all(type(gpu) is int and gpu >= 0 for gpu in gpus)
    is_valid = is_valid and all(port is None or (type(port) is int and 0 < port < 1 << 16) for port in ports)
    return answer if is_valid else AgentError(node, "internal", "the answer to the lease request has invalid GPUs or ports")
