"""Check that the keys of a pool fit its backend."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distflow.documents.document import View

__all__ = ["ENGINES", "refuse_keys_of_engines", "refuse_keys_of_nodes"]

ENGINES: Mapping[str, str] = MappingProxyType({"slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "Ray"})
"""Backends whose nodes a cluster engine chooses, and the names of the engines."""
_ENGINE_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "slurm": ("slurm",),
        "kubernetes": ("kubernetes",),
        "ray": ("ray",),
        "login": ("slurm", "ray"),
        "platforms": ("slurm", "kubernetes", "ray"),
    }
)
"""Keys of a pool, each with the only backends that have it."""
_PLATFORM_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "slurm": ("partition", "constraint", "gres"),
        "kubernetes": ("node_selector", "tolerations", "gpu_resource"),
        "ray": ("resources",),
    }
)
"""Keys of an entry of ``platforms`` for each backend."""
_NODE_KEYS = ("nodes", "hostfile")
_MACHINE_KEYS = ("host", "port", "user", "identity_file", "address", "gpus", "cpus", "memory", "platform", "labels")
"""Keys of ``defaults`` that describe particular machines."""
_RESOURCE_KEYS = ("gpus", "cpus", "memory", "platform")
_NODE_HINTS: Mapping[str, str] = MappingProxyType(
    {"slurm": "; use `slurm: {partition: …, constraint: …}` to choose kinds of nodes"}
)


def refuse_keys_of_nodes(pool: View, backend: str) -> None:
    """Add findings about keys that describe particular machines, in a pool whose nodes an engine chooses."""
    engine = ENGINES[backend]
    for key in _NODE_KEYS:
        if key in pool.keys:
            pool.add(
                f"a pool with `backend: {backend}` has no `{key}`, because {engine} chooses the nodes",
                f"remove `{key}`{_NODE_HINTS.get(backend, '')}",
                key=key,
            )
    defaults = pool.view("defaults")
    for key in defaults.keys:
        if key in _MACHINE_KEYS:
            hint = "remove it; tasks request resources in their spec" if key in _RESOURCE_KEYS else "remove it"
            if key in ("host", "port", "user", "identity_file") and backend in _ENGINE_KEYS["login"]:
                hint = "remove it; the key `login` of the pool describes the connection to the cluster"
            defaults.add(f"`defaults.{key}` has no meaning with `backend: {backend}`, which chooses the nodes", hint, key=key)


def refuse_keys_of_engines(pool: View, backend: str) -> None:
    """Add findings about keys of engines in a pool of another backend."""
    for key, backends in _ENGINE_KEYS.items():
        if key in pool.keys and backend not in backends:
            names = [f"`backend: {name}`" for name in backends]
            pool.add(f"`{key}` needs {' or '.join(names)}", f"write {names[0]}, or remove `{key}`", key=key)
    if backend not in ENGINES:
        return
    known = ", ".join(f"`{key}`" for key in _PLATFORM_KEYS[backend])
    foreign = {key: other for other, keys in _PLATFORM_KEYS.items() if other != backend for key in keys}
    for name in pool.view("platforms").keys:
        platform = pool.view("platforms", name)
        for key in filter(foreign.__contains__, platform.keys):
            message = f"`{key}` of a platform needs `backend: {foreign[key]}`"
            platform.add(message, f"remove it; with `backend: {backend}`, a platform has {known}", key=key)
