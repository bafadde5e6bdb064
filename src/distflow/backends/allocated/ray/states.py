"""Translate Ray's reports about placement groups and actors into states of allocations.

The states and reasons are those of Ray 2.9 to 2.60 (``gcs.proto`` and ``common.proto`` in its sources). An unknown state counts
as waiting, and an unknown reason for an actor's death as a lost node.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from distflow.backends.allocated.engine import AllocationState, Granted, Over, Queued
from distflow.documents.quantities import bytes_text
from distflow.documents.text import few, plain
from distflow.lifecycle.states import Reason

__all__ = ["ACTOR_STATES", "DEATHS", "GROUP_STATES", "SCHEDULING", "Endpoint", "hosts_of", "parse_allocation"]

GROUP_STATES = ("PENDING", "PREPARED", "CREATED", "REMOVED", "RESCHEDULING")
ACTOR_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD")

SCHEDULING: Mapping[str, str] = MappingProxyType(
    {
        "QUEUED": "waits to be scheduled",
        "SCHEDULING_STARTED": "is being scheduled",
        "NO_RESOURCES": "waits for free resources",
        "INFEASIBLE": "cannot be placed on the nodes that the cluster has now",
        "FAILED_TO_COMMIT_RESOURCES": "waits until Ray tries again to reserve its resources",
        "FINISHED": "has its nodes",
        "REMOVED": "is being removed",
    }
)
"""Ray's scheduling state of a placement group → the end of a sentence about the group."""

DEATHS: Mapping[str, tuple[Reason, str]] = MappingProxyType(
    {
        "WORKER_DIED": (Reason.NODE_LOST, "its actor's process ended"),
        "OWNER_DIED": (Reason.NODE_LOST, "the owner of its actor ended"),
        "NODE_DIED": (Reason.NODE_LOST, "its Ray node died"),
        "RAY_KILL": (Reason.CANCELED, "its actor was killed with `ray.kill`, not by distflow"),
        "OUT_OF_SCOPE": (Reason.CANCELED, "its actor was released, not by distflow"),
        "REF_DELETED": (Reason.CANCELED, "its actor was released, not by distflow"),
        "UNSPECIFIED": (Reason.NODE_LOST, "its actor ended"),
    }
)
"""Ray's reason for the death of an actor → distflow's reason, and a clause for the message."""

_OTHER_DEATHS: Mapping[str, tuple[Reason, str]] = MappingProxyType(
    {
        "oom_context": (Reason.OOM_KILLED, "Ray killed its actor, because its node was out of memory"),
        "runtime_env_failed_context": (Reason.START_ERROR, "Ray could not create the environment of its actor"),
        "actor_unschedulable_context": (Reason.NODE_LOST, "Ray could not place its actor"),
        "creation_task_failure_context": (Reason.START_ERROR, "its actor could not start"),
    }
)
"""As ``DEATHS``, by the kind of Ray's ``ActorDeathCause``. These kinds come first, because they have no such reason."""
_PREEMPTED = "AUTOSCALER_DRAIN_PREEMPTED"
_AMOUNTS = ("CPU", "GPU", "memory")


class Endpoint(Struct, frozen=True, kw_only=True):
    """The address and port at which an actor accepts connections, and the token that clients need."""

    address: str
    port: int
    token: str


def parse_allocation(
    found: Mapping[str, Any] | None, nodes: Sequence[Mapping[str, Any]], tasks: Sequence[str], name: str
) -> tuple[AllocationState, Mapping[str, Endpoint]]:
    """Return the state of an allocation, and the endpoint of each host if it is granted.

    ``found`` is the report of the program on the cluster, or ``None`` if Ray does not know the allocation. ``nodes`` are
    the nodes of the cluster. ``tasks`` are in the order of the bundles. Raises ``ValueError``, ``KeyError``, ``TypeError`` or
    ``AttributeError`` if the report is malformed.
    """
    if found is None:
        return Over(
            reason=Reason.NODE_LOST, message=f"Ray no longer knows placement group {name}; its head may have been restarted"
        ), {}
    actors = sorted(found["actors"], key=lambda one: int(one["index"]))
    names = {str(one["id"]): plain(str(one["name"])) for one in nodes}
    dead = sorted((one for one in actors if one["state"] == "DEAD"), key=lambda one: float(one["ended"] or 0))
    if found["state"] == "REMOVED" or any(_is_removal(one) for one in dead):
        message = (
            f"placement group {name} was removed by another program, or automatically because no "
            "supervisor used it for longer than `idle_release`"
        )
        return Over(reason=Reason.CANCELED, message=message, tasks_may_have_ended=True), {}
    hosts = hosts_of([names.get(str(one["node"]), str(one["node"])[:12]) for one in actors])
    if dead:
        first = _first_death(dead)
        return _death(
            first, tasks, names, [host for host, one in zip(hosts, actors, strict=True) if one["node"] == first["node"]]
        ), {}
    if found["state"] != "CREATED":
        return Queued(_pending(found, nodes)), {}
    endpoints = [_endpoint(one) for one in actors]
    if len(endpoints) < len(found["bundles"]) or any(one["state"] != "ALIVE" for one in actors) or None in endpoints:
        return Queued("has its nodes, and Ray starts distflow's actors on them"), {}
    return Granted(hosts=dict(zip(tasks or map(str, range(len(hosts))), hosts, strict=False))), {
        host: endpoint for host, endpoint in zip(hosts, endpoints, strict=True) if endpoint is not None
    }


def hosts_of(names: Sequence[str]) -> list[str]:
    """Return a host name for each task: several tasks on one node get ``n1``, ``n1+2`` and so on."""
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        host = "".join(character if character.isalnum() or character in "._-" else "-" for character in name)[:200] or "node"
        found.append(host if counts[name] == 1 else f"{host}+{counts[name]}")
    return found


def _first_death(dead: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return an actor whose node died, or else the actor that died first."""
    return next((one for one in dead if (one["cause"] or {}).get("reason") == "NODE_DIED"), dead[0])


def _is_removal(actor: Mapping[str, Any]) -> bool:
    """Return whether an actor died with its placement group, which Ray may report before the group's state changes."""
    detail = str((actor["cause"] or {}).get("message", ""))
    return "placement group is removed" in detail or "placement group was removed" in detail


def _death(actor: Mapping[str, Any], tasks: Sequence[str], names: Mapping[str, str], lost: Sequence[str]) -> Over:
    """Return the end of an allocation by the death of an actor. ``lost``: the hosts on its Ray node."""
    cause = actor["cause"] or {}
    kind, detail = str(cause.get("kind", "")), str(cause.get("message", ""))
    reason, text = _OTHER_DEATHS.get(kind) or DEATHS.get(str(cause.get("reason")), DEATHS["UNSPECIFIED"])
    if cause.get("node") == _PREEMPTED:
        reason, text = Reason.PREEMPTED, "its Ray node was preempted"
    index = int(actor["index"])
    task = tasks[index] if 0 <= index < len(tasks) else f"number {index}"
    host = names.get(str(actor["node"]), "")
    message = f"task {task}{f' on {host}' if host else ''}: {text}"
    last_line = _last_line(detail)
    return Over(
        reason=reason,
        message=f"{message} ({last_line})" if last_line else message,
        hosts=tuple(lost) if host and reason is Reason.NODE_LOST else (),
        is_failure=reason is Reason.START_ERROR,
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return plain(lines[-1])[:300] if lines else ""


def _endpoint(actor: Mapping[str, Any]) -> Endpoint | None:
    endpoint = actor.get("endpoint")
    if not isinstance(endpoint, Mapping):
        return None
    port = int(endpoint["port"])
    if not 0 < port < 65536:
        raise ValueError(f"the port {port} of distflow's actor is not between 1 and 65535")
    bytes.fromhex(str(endpoint["token"]))
    ipaddress.ip_address(str(endpoint["address"]))
    return Endpoint(address=str(endpoint["address"]), port=port, token=str(endpoint["token"]))


def _pending(found: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str:
    word = str(found["scheduling"])
    if found["state"] == "RESCHEDULING":
        return "has lost a node, and Ray searches for another one (RESCHEDULING)"
    text = SCHEDULING.get(word, "waits")
    requested = Counter(_resources(one) for one in found["bundles"])
    wanted = " and ".join(f"{number} × {one or 'nothing'}" for one, number in requested.items())
    free = few([f"{plain(str(one['name']))} {_free(one)}" for one in nodes if one["is_alive"]], "; ")
    return f"{text} ({plain(word)[:40]}); requested with {plain(str(found['strategy']))}: {wanted}; free: {free or 'no node'}"


def _resources(bundle: Mapping[str, Any]) -> str:
    return ", ".join(_amount(name, float(amount)) for name, amount in sorted(bundle.items()) if amount)


def _amount(name: str, amount: float) -> str:
    return f"{bytes_text(int(amount))} memory" if name == "memory" else f"{amount:g} {plain(name)}"


def _free(node: Mapping[str, Any]) -> str:
    return ", ".join(_of(name, float(node["free"][name]), float(node["total"][name])) for name in _kinds(node))


def _of(name: str, free: float, total: float) -> str:
    if name == "memory":
        return f"{bytes_text(int(free))} of {bytes_text(int(total))} memory"
    return f"{free:g} of {total:g} {name}"


def _kinds(node: Mapping[str, Any]) -> Iterable[str]:
    return [name for name in _AMOUNTS if node["total"][name] and (name != "memory" or node["free"][name] < node["total"][name])]
