"""Open the engine of a pool, and transports to the nodes that it allocated."""

from __future__ import annotations

from distflow.backends.allocated.engine import Engine, Over, host_of
from distflow.backends.allocated.relay import RelayTransport
from distflow.backends.allocated.script import resident_script
from distflow.backends.allocated.slurm.slurm_engine import SlurmEngine
from distflow.backends.machines.connection.destination import destination_of
from distflow.pools.model import Node, Pool
from distflow.transports.base import Transport
from distflow.transports.local import LocalTransport
from distflow.transports.multiplexed import MultiplexedTransport
from distflow.transports.ssh import load_ssh

__all__ = ["open_engine", "open_transport"]


def open_engine(pool: Pool, *, owns_login: bool = False) -> Engine:
    """Return the engine that allocates the nodes of a pool, without connecting.

    With ``owns_login``, the ``close`` of a transport to one of its nodes is that of the engine.
    """

    def relay(login: Transport, job: str, host: str, python: str) -> Transport:
        return RelayTransport(login, job, host, python, het_group=lambda: engine.het_group(job, host), owns_login=owns_login)

    engine = SlurmEngine(pool, _login(pool), script=resident_script, relay=relay)
    return engine


def open_transport(pool: Pool, node: Node) -> Transport:
    """Return a transport to an allocated node.

    After the end of the allocation it leads to the login node, which has the files if they are on a shared file system. Raises
    ``NodeUnreachable`` if the engine cannot be asked.
    """
    host, allocation = host_of(node.name)
    engine = open_engine(pool, owns_login=True)
    try:
        is_over = isinstance(engine.states({allocation: ()}).get(allocation), Over)
    except BaseException:
        engine.close()
        raise
    if not is_over:
        return engine.transport(allocation, host)
    engine.close()
    return _login(pool)


def _login(pool: Pool) -> Transport:
    if pool.login is None:
        return LocalTransport(pool.name)
    return MultiplexedTransport(load_ssh()(pool.login.name, destination_of(pool, pool.login)))
