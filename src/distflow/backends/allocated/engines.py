"""Open the engine of a pool, and transports to the nodes that it allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from distflow.backends.allocated.engine import Engine
from distflow.backends.allocated.kubernetes.kubernetes_engine import KubernetesEngine
from distflow.backends.allocated.kubernetes.pods import index_of_host
from distflow.backends.allocated.nodes import Engines
from distflow.backends.allocated.ray.ray_engine import RayEngine
from distflow.backends.allocated.relay import RelayTransport
from distflow.backends.allocated.script import resident_command, resident_script
from distflow.backends.allocated.slurm.slurm_engine import SlurmEngine
from distflow.backends.machines.connection.destination import destination_of
from distflow.pools.model import Node, Pool
from distflow.transports.base import Transport
from distflow.transports.local import LocalTransport
from distflow.transports.multiplexed import MultiplexedTransport
from distflow.transports.ssh import load_ssh

__all__ = ["open_engine", "open_transport"]


def open_engine(pool: Pool) -> Engine:
    """Return the engine that allocates the nodes of a pool, without connecting."""
    return _ENGINES[pool.backend](pool)


def _open_slurm(pool: Pool) -> Engine:
    return SlurmEngine(pool, _login(pool), script=resident_script, relay=RelayTransport)


def _open_kubernetes(pool: Pool) -> Engine:
    def relay(carrier: Transport, allocation_id: str, host: str, python: str) -> Transport:
        return RelayTransport(carrier, allocation_id, host, python, resident=str(index_of_host(host)))

    return KubernetesEngine(pool, command=resident_command, relay=relay)


def _open_ray(pool: Pool) -> Engine:
    return RayEngine(pool, _login(pool))


_ENGINES: Mapping[str, Callable[[Pool], Engine]] = MappingProxyType(
    {"slurm": _open_slurm, "kubernetes": _open_kubernetes, "ray": _open_ray}
)
"""Backend → function that opens its engine."""
_SHARED = Engines(open_engine)


def open_transport(pool: Pool, node: Node) -> Transport:
    """Return a transport to an allocated node, without connecting.

    After the end of the allocation, it uses the login node, which has the node's files if they are on a shared file system.
    All transports to nodes of a pool share one engine, and with it the connection to the login node or the API server.
    """
    return _SHARED.transport(pool, node.name)


def _login(pool: Pool) -> Transport:
    if pool.login is None:
        return LocalTransport(pool.name)
    return MultiplexedTransport(load_ssh()(pool.login.name, destination_of(pool, pool.login)))
