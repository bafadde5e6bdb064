"""The spec's tokens and injected paths, turned into numbers and placeholders.

``{{host:master}}`` becomes a placeholder for that node's address, ``{{rank_offset}}`` a number. Without a container a
file cannot appear at ``/train.py``: it is placed below the attempt's own directory, and every mention of exactly that
path in the command, the arguments, the environment and the other injected files follows it there.

In OSMO's containers a task starts in ``/``, so that ``/tmp/a.sh``, ``tmp/a.sh`` and a file injected as ``tmp/a.sh`` are one. A
task starts in ``work`` here: a path that is injected or named in its relative form lies there, under both forms.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from distflow.layout.ranks import TaskRanks, World
from distflow.plan.model import ATTEMPT_DIR, address_of
from distflow.spec.model import DataSpec, EarlierInput, InputSpec

__all__ = [
    "KNOWN_PLACES",
    "TOKEN",
    "Rewrite",
    "input_place",
    "place_of",
    "relative_paths",
    "rewriter",
    "uses_tmp",
]

TOKEN = re.compile(r"\{\{ *([a-z_]+)(?: *: *([A-Za-z0-9_-]+))? *\}\}")
"""A token as the spec floor leaves it in strings."""

_CONTINUES = re.compile(r"(?:(?<=[\w})\]./*])(?<!\b[bfruBFRU])(?<!\b[bfrBFR][bfrBFR])|\+ ?[bfruBFRU]?)[\"']\Z")
"""What may follow a path: the end of a quoted text, as in ``"$FOLDER"/train.py``, but not the prefix of one in Python; or
a sum of texts, as in ``folder + "/train.py"``."""

Rewrite = Callable[[str], str]

KNOWN_PLACES: Mapping[str, str] = MappingProxyType(
    {
        "/osmo/data/output": "output",
        "/osmo/data/input": "input",
        "/osmo/run/workspace": "work",
        "/valohai/outputs": "output",
        "/valohai/inputs": "input",
        "/valohai/repository": "work",
        "/valohai/config": "config",
    }
)
"""Directories that the containers of OSMO and Valohai have, and which of the attempt's they are here."""


def _token_values(ranks: TaskRanks | None, world: World | None) -> Mapping[str, str]:
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


def place_of(path: str, in_work: Container[str] = ()) -> str:
    """Return where an injected path lies in the attempt's directory: absolute ones in ``files``, others in ``work``.

    What the containers of OSMO and Valohai have of their own is what the attempt has. ``in_work`` are absolute paths that lie
    in ``work`` too.
    """
    for theirs, ours in KNOWN_PLACES.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return f"{ours}{path.removeprefix(theirs)}"
    is_in_work = not path.startswith("/") or posixpath.normpath(path) in in_work
    return f"{'work' if is_in_work else 'files'}/{path.lstrip('/')}"


def relative_paths(injected: Iterable[tuple[str, bool]], texts: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """Return the absolute paths that lie in ``work``, and whether each is a directory.

    These are relative paths of ``injected`` as seen from ``/``, and absolute ones whose relative form is mentioned.
    ``injected`` holds each path and whether it is a directory, ``texts`` each text of the task and the file that holds it
    (empty: none does). A file's mentions of itself do not count.
    """
    paths = [(posixpath.normpath(path), tree) for path, tree in injected]
    absolute = {path: tree for path, tree in paths if path.startswith("/")}
    relative = {f"/{path}": tree for path, tree in paths if not path.startswith("/") and path != "."}
    told = [(posixpath.normpath(owner), text) for owner, text in texts]
    mentioned = {
        path: tree
        for path, tree in absolute.items()
        if path not in relative
        and any(owner != path and path[1:] in text and _relative(path, tree).search(text) for owner, text in told)
    }
    return {path: tree for path, tree in relative.items() if path not in absolute} | mentioned


def uses_tmp(texts: Iterable[tuple[str, str]]) -> bool:
    """Return whether the texts of a task name something below ``tmp/``, which every image has in its ``/``."""
    return any(_TMP.search(text) for _, text in texts)


_TMP = re.compile(r"(?<![\w./-])(?:\./)?tmp/")


def _relative(path: str, tree: bool) -> re.Pattern[str]:
    """Return what matches the relative form of an absolute path; of ``/data`` only ``data/``: the word alone means little."""
    plain = tree and path.count("/") == 1
    return re.compile(r"(?<![\w./-])(?:\./)?" + re.escape(path.lstrip("/")) + ("(?=/)" if plain else _end(tree)))


def _end(tree: bool) -> str:
    return r"(?=/|(?![\w.-]))" if tree else r"(?![\w/-]|\.\w)"


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
    in_work: Container[str] = (),
) -> Rewrite:
    """Return the function that turns a string of the spec into one of the plan.

    ``injected`` holds each absolute path and whether it is a directory; mentions of what lies in a directory follow it too.
    ``others`` are the inputs that do not come from tasks of this workflow, ``hosts`` the tasks of the group; ``None``: any;
    ``in_work`` as for ``place_of``.
    """
    values = _token_values(ranks, world)
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
    paths = sorted({*injected, *((path, True) for path in KNOWN_PLACES)}, key=lambda item: len(item[0]), reverse=True)
    pattern = "|".join(re.escape(path.rstrip("/")) + _end(tree) for path, tree in paths)
    # Not in `{{output}}/train.py`, `$(pwd)/train.py`, `~/train.py`.
    mention = re.compile(r"(?<![\w./})~*\]-])(?:" + pattern + ")")

    def place(match: re.Match[str]) -> str:
        if _CONTINUES.search(match.string, max(0, match.start() - 8), match.start()):
            return match.group(0)
        return f"{ATTEMPT_DIR}/{place_of(match.group(0), in_work)}"

    def rewrite(text: str) -> str:
        return TOKEN.sub(token, mention.sub(place, text))

    return rewrite
