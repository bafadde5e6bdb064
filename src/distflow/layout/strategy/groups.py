"""The strategy of a group, checked against the ranks of its tasks."""

from __future__ import annotations

from collections.abc import Mapping

from distflow.documents.problems import Problem, Severity
from distflow.layout.ranks import World
from distflow.layout.strategy.forms import FOREIGN_KEYS
from distflow.layout.strategy.model import Strategy, parse_strategy
from distflow.spec.model import GroupSpec

__all__ = ["group_strategy", "unread_strategy"]

_OF_THEIR_OWN = ("accelerate", "deepspeed", "horovod", "jax", "tensorflow")
"""Frameworks that distribute a model according to their own configuration or the program."""


def group_strategy(group: GroupSpec, world: World | None) -> tuple[Strategy | None, tuple[Problem, ...]]:
    """Return the strategy of a group and all findings about it; nothing for a group without one."""
    block = group.strategy
    if block is None:
        return None, ()
    if world is None:
        message = "`strategy` says how ranks train together, but no task of the group has any"
        hint = "give its tasks `ranks: {size: N}`, or the group a `launcher`"
        return None, (Problem(where=block.mark_at(block.path), message=message, hint=hint),)
    strategy, problems = parse_strategy(block.value, [item.size for item in world.tasks], path=block.path, locate=block.mark_at)
    cluster = block.value.get("cluster")
    says_ray = isinstance(cluster, Mapping) and cluster.get("name") == "ray"
    if says_ray and (group.framework is None or group.framework.value != "ray"):
        message = "`cluster: {name: ray}` does not start Ray"
        hint = "write `framework: ray` in the group, which starts it; or remove `name` for plain DDP"
        ray = Problem(where=block.mark_at((*block.path, "cluster", "name")), message=message, hint=hint)
        return None, (ray, *problems)
    foreign = [key for key in block.value if key in FOREIGN_KEYS]
    if strategy is None or not foreign:
        return strategy, problems
    import yaml  # noqa: PLC0415  only blocks of other guides need it

    keys = ", ".join(f"`{key}`" for key in foreign)
    text = yaml.safe_dump(strategy.as_block(), default_flow_style=True, sort_keys=False, width=10_000).strip()
    converted = Problem(
        where=block.mark_at((*block.path, foreign[0])),
        severity=Severity.WARNING,
        message=f"the strategy was converted from another form ({keys})",
        hint=f"write the same as `strategy: {text}`",
    )
    return strategy, (converted, *problems)


def unread_strategy(group: GroupSpec) -> tuple[Problem, ...]:
    """Return a warning for a ``strategy`` of a group whose framework does not read it."""
    block, framework = group.strategy, group.framework
    if block is None or framework is None or framework.value not in _OF_THEIR_OWN:
        return ()
    message = f"`framework: {framework.value}` does not read `strategy`: it follows its own configuration"
    hint = "configure it there, or use `framework: pytorch`; a program that calls `distflow.train.parallelize` follows it"
    return (Problem(where=block.mark_at(block.path), severity=Severity.WARNING, message=message, hint=hint),)
