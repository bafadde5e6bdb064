"""The spec's tokens and injected paths, turned into numbers and placeholders.

``{{host:master}}`` becomes a placeholder for that node's address, ``{{rank_offset}}`` a number. Without a container a
file cannot appear at ``/train.py``: it is placed below the attempt's own directory, and every mention of exactly that
path in the command, the arguments, the environment and the other injected files follows it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType

from distflow.layout.ranks import TaskRanks, World
from distflow.plan.model import ATTEMPT_DIR, address_of
from distflow.spec.model import DataSpec, EarlierInput, InputSpec

__all__ = ["OSMO_PLACES", "TOKEN", "Rewrite", "input_place", "place_of", "rewriter", "token_values"]

TOKEN = re.compile(r"\{\{ *([a-z_]+)(?: *: *([A-Za-z0-9_-]+))? *\}\}")
"""A token as the spec floor leaves it in strings."""

Rewrite = Callable[[str], str]

OSMO_PLACES: Mapping[str, str] = MappingProxyType(
    {"/osmo/data/output": "output", "/osmo/data/input": "input", "/osmo/run/workspace": "work"}
)
"""Directories that OSMO's containers have, and which of the attempt's they are here."""


def token_values(ranks: TaskRanks | None, world: World | None) -> Mapping[str, str]:
    """Return what each token without an argument becomes in one task."""
    values = {
        "workflow_id": "@@WORKFLOW_ID@@",
        "output": f"{ATTEMPT_DIR}/output",
        "master_addr": "@@MASTER_ADDR@@",
        "master_port": "@@MASTER_PORT@@",
    }
    if ranks is not None and world is not None:
        values |= {
            "rank_offset": str(ranks.offset),
            "rank_size": str(ranks.size),
            "world_size": str(world.world_size),
            "node_rank": str(ranks.node_rank),
            "num_nodes": str(len(world.tasks)),
        }
    return values


def place_of(path: str) -> str:
    """Return where an injected path lies in the attempt's directory: absolute ones in ``files``, others in ``work``.

    What OSMO's containers have of their own is what the attempt has.
    """
    for theirs, ours in OSMO_PLACES.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return f"{ours}{path.removeprefix(theirs)}"
    return f"files/{path.lstrip('/')}" if path.startswith("/") else f"work/{path}"


def input_place(position: int) -> str:
    """Return where an entry of ``inputs`` lies in the attempt's directory."""
    return f"input/{position}"


def rewriter(
    ranks: TaskRanks | None,
    world: World | None,
    injected: Sequence[tuple[str, bool]],
    inputs: Sequence[InputSpec] = (),
    others: Sequence[DataSpec | EarlierInput] = (),
    hosts: Container[str] | None = None,
) -> Rewrite:
    """Return the function that turns a string of the spec into one of the plan.

    ``injected`` holds each absolute path and whether it is a directory; mentions of what lies in a directory follow it too.
    ``others`` are the inputs that do not come from tasks of this workflow, ``hosts`` the tasks of the group; ``None``: any.
    """
    values = token_values(ranks, world)
    everything = sorted((*inputs, *others), key=lambda one: one.position, reverse=True)
    # Of several entries for one task its name means the first.
    places = {one.task: input_place(one.position) for one in everything if not isinstance(one, DataSpec)}
    places |= {str(one.position): input_place(one.position) for one in everything}

    def token(match: re.Match[str]) -> str:
        name, argument = match.group(1), match.group(2)
        if name == "host" and argument is not None and (hosts is None or argument in hosts):
            return address_of(argument)
        if name == "input" and argument in places:
            return f"{ATTEMPT_DIR}/{places[argument]}"
        return values.get(name, match.group(0)) if argument is None else match.group(0)

    # Longest first, so that /data/train.py wins over /data.
    paths = sorted({*injected, *((path, True) for path in OSMO_PLACES)}, key=lambda item: len(item[0]), reverse=True)
    pattern = "|".join(
        re.escape(path.rstrip("/")) + (r"(?=/|(?![\w.-]))" if tree else r"(?![\w/-]|\.\w)") for path, tree in paths
    )
    mention = re.compile(rf"(?<![\w./-])(?:{pattern})")

    def rewrite(text: str) -> str:
        moved = mention.sub(lambda match: f"{ATTEMPT_DIR}/{place_of(match.group(0))}", text)
        return TOKEN.sub(token, moved)

    return rewrite
