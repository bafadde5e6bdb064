"""The settings of a pool on Ray, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from distflow.documents.document import View, path_text
from distflow.documents.quantities import parse_duration
from distflow.pools.model import RayPlatform, RaySettings

__all__ = ["parse_ray"]

_Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
_STRATEGIES: Mapping[str, _Strategy] = MappingProxyType(
    {"PACK": "PACK", "SPREAD": "SPREAD", "STRICT_PACK": "STRICT_PACK", "STRICT_SPREAD": "STRICT_SPREAD"}
)
_SPEC_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


def parse_ray(pool: View) -> RaySettings:
    """Return the settings for requesting nodes, and add findings to those of the configuration."""
    ray, defaults = pool.view("ray"), RaySettings()
    idle_release_s = ray.parsed("idle_release", parse_duration)
    if idle_release_s == 0:
        at = path_text((*ray.path, "idle_release"))
        ray.add(f"`{at}` must be more than 0", "write a duration such as `10m`", key="idle_release")
    address = ray.string("address") or defaults.address
    if address.startswith("ray://"):
        at = path_text((*ray.path, "address"))
        message = f"`{at}` is an address of Ray Client, which cannot transfer the output and the files of tasks"
        hint = "set `login` of the pool to a node of the cluster. "
        hint += "Then remove `address`, or set it to Ray's own address, `HOST:6379`"
        ray.add(message, hint, key="address")
    python = ray.string("python") or pool.string("python") or pool.view("defaults").string("python")
    return RaySettings(
        address=address,
        strategy=_STRATEGIES.get(ray.string("strategy") or "", defaults.strategy),
        python=python or defaults.python,
        idle_release_s=defaults.idle_release_s if idle_release_s is None else idle_release_s,
        platforms=MappingProxyType({name: _platform(pool.view("platforms", name)) for name in pool.view("platforms").keys}),
    )


def _platform(item: View) -> RayPlatform:
    resources = item.view("resources")
    found: dict[str, float] = {}
    for name in resources.keys:
        amount = resources.document.value_at((*resources.path, name))
        if name in _SPEC_RESOURCES:
            why = "is not supported" if name == "object_store_memory" else "comes from the `resources` of the spec"
            resources.add(f"`{name}` of a platform {why}", "remove it", key=name)
        elif isinstance(amount, int | float) and not isinstance(amount, bool) and amount > 0:
            found[name] = float(amount)
    return RayPlatform(resources=MappingProxyType(found))
