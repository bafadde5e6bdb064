"""Choose the pool of a command: the named one or the default one. A hostfile replaces its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distflow.errors import InputError, NotFound
from distflow.pools.hostfile import Host, nodes_of
from distflow.pools.model import Configuration, Pool, ssh_node

__all__ = ["HOSTFILE_POOL", "choose_pool", "with_hosts"]

HOSTFILE_POOL = "hostfile"
"""The name of the pool that consists of a hostfile alone."""


def choose_pool(
    configuration: Configuration, *, given: str | None = None, wanted: str | None = None, hosts: Sequence[Host] | None = None
) -> Pool:
    """Return the pool of the flag (``given``), or that of the spec (``wanted``), or the default one.

    With ``hosts``, these are its nodes. A pool over SSH keeps its settings. Any other pool is an error if the flag names it,
    and is otherwise replaced by a pool with default settings.
    """
    name = given or wanted or configuration.default_pool
    if hosts is not None and name == HOSTFILE_POOL and name not in configuration.pools:
        return _bare(hosts)
    pool = configuration.pools.get(name)
    if pool is None:
        there = ", ".join(sorted(configuration.pools))
        where = configuration.file or "the built-in configuration"
        alone = f"; `--pool {HOSTFILE_POOL}` takes nothing but the hostfile" if hosts is not None else ""
        raise NotFound(f"there is no pool {name!r} in {where}", hint=f"there is: {there}{alone}")
    if hosts is None:
        return pool
    base = configuration.bases.get(name)
    if base is not None:
        return replace(pool, nodes=nodes_of(hosts, base, pool.nodes))
    if given:
        hint = f"name a pool with `backend: ssh`, or leave --pool out: `{HOSTFILE_POOL}` is the pool then"
        raise InputError(f"a hostfile names machines to reach over SSH, and the pool {name!r} is not", hint=hint)
    return _bare(hosts)


def with_hosts(configuration: Configuration, hosts: Sequence[Host] | None, *, given: str | None = None) -> Configuration:
    """Return the configuration with the hostfile's pool as the default one; unchanged without a hostfile."""
    if hosts is None:
        return configuration
    chosen = choose_pool(configuration, given=given, hosts=hosts)
    return replace(configuration, pools={**configuration.pools, chosen.name: chosen}, default_pool=chosen.name)


def _bare(hosts: Sequence[Host]) -> Pool:
    return Pool(name=HOSTFILE_POOL, backend="ssh", nodes=nodes_of(hosts, ssh_node()))
