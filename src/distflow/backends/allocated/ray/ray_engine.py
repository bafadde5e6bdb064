"""Ray as a cluster engine: placement groups with an actor for each task."""

from __future__ import annotations

import importlib.resources
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Granted,
    NodeRequest,
    Over,
    QueryLimit,
    RequestRefused,
    node_name,
)
from distflow.backends.allocated.ray.endpoint import EndpointTransport
from distflow.backends.allocated.ray.program import ClusterProgram, unreadable_answer
from distflow.backends.allocated.ray.ray_checks import check_ray
from distflow.backends.allocated.ray.states import Endpoint, parse_allocation
from distflow.backends.base import NO_EXIT_CODES
from distflow.backends.machines.checks.findings import Finding
from distflow.documents.text import did_you_mean, plain
from distflow.errors import NodeUnreachable
from distflow.pools.model import Pool, RaySettings, ssh_node
from distflow.transports.base import BorrowedTransport, Transport
from distflow.transports.multiplexed import MultiplexedTransport

__all__ = ["RayEngine", "bundle_of"]


class RayEngine:
    """Allocates nodes as placement groups of a Ray cluster (contract: ``allocated.engine.Engine``)."""

    query_limit: ClassVar = QueryLimit(at_once=8.0, every_s=2.0)

    def __init__(self, pool: Pool, login: Transport) -> None:
        """Use the cluster's own Python on the machine behind ``login``. ``close`` also closes ``login``."""
        self._pool = pool
        self._settings = pool.ray or RaySettings()
        self._template = pool.template or ssh_node()
        self._login = login
        self._program = ClusterProgram(login, python=self._settings.python, address=self._settings.address)
        self._state = threading.Lock()
        """Guards the attributes below."""
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        """The endpoint of each node, by allocation and host."""
        self._over: dict[str, Over] = {}
        """Ended allocation → its first reported end, because Ray may report another reason after the release."""
        self._unreleased: set[str] = set()
        """Ended allocations that have not been released yet."""
        self._notices: dict[str, str] = {}

    def request(self, wanted: AllocationRequest) -> str:
        """Create a placement group with its actors, or return the one that exists already for this allocation."""
        bundles = [bundle_of(self._pool.name, self._settings, node) for node in wanted.nodes]
        answer = self._program.ask(
            "request", marker=wanted.allocation.marker, bundles=bundles, strategy=self._settings.strategy,
            excluded=[[_ray_node(host) for host in node.excluded] for node in wanted.nodes], resident=_resident(),
            idle_release_s=self._settings.idle_release_s,
        )  # fmt: skip
        try:
            found = str(answer["id"])
            with self._state:
                self._notices[found] = plain(str(answer["notice"]))
        except (KeyError, TypeError) as error:
            raise unreadable_answer(self._login.name, error) from error
        return found

    def notice(self, allocation_id: str) -> str:
        """Return a warning about the request for an allocation; empty if there is none."""
        with self._state:
            return self._notices.get(allocation_id, "")

    def states(self, ids: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        """Return the state of each allocation, with at most one query. Ended allocations are released."""
        with self._state:
            found: dict[str, AllocationState] = {one: self._over[one] for one in ids if one in self._over}
        queried = [one for one in ids if one not in found]
        if queried:
            found |= self._query(queried, ids)
        with self._state:
            ended = list(self._unreleased)
        if ended:
            self.release(ended)
        return found

    def _query(self, queried: Sequence[str], tasks: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        """Return the current states of allocations. ``tasks`` is the ``ids`` of ``Engine.states``."""
        found: dict[str, AllocationState] = {}
        answer = self._program.ask("states", ids=queried)
        try:
            for one in queried:
                state, endpoints = parse_allocation(answer["states"][one], answer["nodes"], tasks[one], one)
                found[one] = state
                with self._state:
                    if isinstance(state, Granted):
                        self._endpoints |= {(one, host): endpoint for host, endpoint in endpoints.items()}
                    elif isinstance(state, Over):
                        self._over[one] = state
                        self._unreleased.add(one)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise unreadable_answer(self._login.name, error) from error
        return found

    def allocations(self) -> Mapping[str, Allocation]:
        """Return all placement groups that carry a marker and were not removed."""
        answer = self._program.ask("allocations")
        try:
            names = {str(one): Allocation.of_marker(str(name)) for one, name in answer.items()}
        except AttributeError as error:
            raise unreadable_answer(self._login.name, error) from error
        return {one: allocation for one, allocation in names.items() if allocation is not None}

    def release(self, ids: Sequence[str], exit_codes: Mapping[str, int] = NO_EXIT_CODES) -> None:  # noqa: ARG002  Ray has no accounting
        """Remove placement groups and their actors, and with them all of their processes."""
        self._program.ask("release", ids=list(ids))
        with self._state:
            self._unreleased.difference_update(ids)
            self._endpoints = {key: endpoint for key, endpoint in self._endpoints.items() if key[0] not in ids}
            for one in ids:
                self._notices.pop(one, None)

    def transport(self, allocation_id: str, host: str) -> Transport:
        """Return a transport to a node of an allocation, without connecting."""
        endpoint = EndpointTransport(
            node_name(host, allocation_id), self._login, lambda: self._endpoint(allocation_id, host), self._settings.python,
        )  # fmt: skip
        return MultiplexedTransport(endpoint, ping_s=self._pool.ping_s)

    def login_transport(self) -> Transport:
        """Return a transport to the machine with the cluster's Python."""
        return BorrowedTransport(self._login)

    def check(self, on_progress: Callable[[str], None] = lambda _: None) -> Sequence[Finding]:
        """Return the findings about the cluster and the pool's settings."""
        return list(check_ray(self._pool, self._login.name, self._program, on_progress))

    def close(self) -> None:
        """Close the connection to the cluster. Allocations stay."""
        self._program.close()
        self._login.close()

    def _endpoint(self, allocation_id: str, host: str) -> Endpoint:
        """Return the endpoint of a node. Raises ``NodeUnreachable`` if Ray does not report one."""
        key = (allocation_id, host)
        with self._state:
            endpoint = self._endpoints.get(key)
        if endpoint is None:
            state = self.states({allocation_id: ()})[allocation_id]
            with self._state:
                endpoint = self._endpoints.get(key)
            if endpoint is None:
                reason = f"Ray reports no ready actor of placement group {allocation_id} on this node"
                raise NodeUnreachable(node_name(host, allocation_id), state.message if isinstance(state, Over) else reason)
        return endpoint


def bundle_of(pool: str, settings: RaySettings, node: NodeRequest) -> dict[str, float]:
    """Return the resources of a task as a bundle of a placement group. Raises ``RequestRefused``."""
    others: Mapping[str, float] = {}
    if node.platform is not None:
        if node.platform not in settings.platforms:
            hint = did_you_mean(node.platform, settings.platforms, what="platforms")
            if not settings.platforms:
                example = f'{{{node.platform}: {{resources: {{"accelerator_type:H100": 0.001}}}}}}'
                hint = f"add for example `platforms: {example}` to the pool"
            raise RequestRefused(f"pool `{pool}` has no platform `{node.platform}`", hint=hint)
        others = settings.platforms[node.platform].resources
    resources = {"CPU": float(node.cpus or 1), "GPU": float(node.gpus), "memory": float(node.memory), **others}
    return {name: amount for name, amount in resources.items() if amount}


def _ray_node(host: str) -> str:
    """Return the name of the Ray node of a host: ``n1`` for ``n1+2``, the host of a second task on that node."""
    return host.partition("+")[0]


def _resident() -> str:
    return importlib.resources.files("distflow.runtime.services").joinpath("resident.py").read_text()
