"""Replace a spec's tokens with numbers, paths and placeholders for addresses, and injected paths with paths on the node.

``{{host:master}}`` becomes a placeholder for the address of the node of the task ``master``, ``{{rank_offset}}`` a number.
A file injected as ``/train.py`` is created below the attempt's directory, with and without a container. Its path is replaced in
the command, the arguments, the environment and the injected files, among others.

In OSMO's containers a task starts in ``/``, so ``/tmp/a.sh``, ``tmp/a.sh`` and a file injected as ``tmp/a.sh`` are the same
file. In distflow a task starts in ``work``. If a path is injected or used in its relative form, distflow therefore puts it into
``work``, and replaces its absolute form with that path.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.plan.model import ATTEMPT_DIR, address_of
from distflow.spec.model import DataSpec, EarlierInput, InputSpec

__all__ = [
    "KNOWN_PLACES",
    "TOKEN",
    "Rewrite",
    "input_place",
    "paths_in_work",
    "place_of",
    "rank_numbers",
    "rewriter",
    "uses_tmp",
]

TOKEN = re.compile(r"\{\{ *([a-z_]+)(?: *: *([A-Za-z0-9_-]+))? *\}\}")
"""A token in a string of a checked spec."""

_CONTINUES = re.compile(r"(?:(?<=[\w})\]./*])(?<!\b[bfruBFRU])(?<!\b[bfrBFR][bfrBFR])|\+ ?[bfruBFRU]?)[\"']\Z")
"""Matches the text before a path that continues another path: the end of a quoted text, as in ``"$FOLDER"/train.py``, or a sum
of texts, as in ``folder + "/train.py"``. It does not match the beginning of a Python string, as in ``f"/train.py"``."""

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
"""Directories in containers of OSMO and Valohai, and the corresponding directories of an attempt."""


def _token_values(ranks: TaskRanks | None, world: WorldLayout | None) -> Mapping[str, str]:
    """Return the values of tokens without arguments for one task."""
    return {
        "workflow_id": "@@WORKFLOW_ID@@",
        "output": f"{ATTEMPT_DIR}/output",
        "master_addr": "@@MASTER_ADDR@@",
        "master_port": "@@MASTER_PORT@@",
        **rank_numbers(ranks, world),
    }


def rank_numbers(ranks: TaskRanks | None, world: WorldLayout | None) -> dict[str, str]:
    """Return the values of the tokens that are numbers of the layout.

    A task without ``ranks`` has only the numbers of its group's ``world``. Without a ``world``, the result is empty.
    """
    values: dict[str, str] = {}
    if world is not None:
        values |= {"world_size": str(world.world_size), "num_nodes": str(len(world.tasks))}
    if ranks is not None:
        values |= {"rank_offset": str(ranks.offset), "rank_size": str(ranks.size), "node_rank": str(ranks.node_rank)}
    return values


def place_of(path: str, in_work: Container[str] = ()) -> str:
    """Return the path below the attempt's directory for an injected path: in ``files`` for an absolute one, else in ``work``.

    Directories of OSMO's and Valohai's containers become directories of the attempt. ``in_work`` are absolute paths to put
    into ``work``, too.
    """
    for theirs, ours in KNOWN_PLACES.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return f"{ours}{path.removeprefix(theirs)}"
    is_in_work = not path.startswith("/") or posixpath.normpath(path) in in_work
    return f"{'work' if is_in_work else 'files'}/{path.lstrip('/')}"


def paths_in_work(injected: Iterable[tuple[str, bool]], texts: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """Return the absolute paths that are in ``work``, and whether each is a directory.

    These are the relative paths in ``injected``, with a leading ``/``, and the absolute paths in ``injected`` whose relative
    form is used in a text. A path that is injected in both forms is left out. ``injected`` has each path and whether it is a
    directory. ``texts`` has the texts of the task, each with the path of its file or ``""``. If the text of a file contains the
    file's own path, that does not count as a use.
    """
    paths = [(posixpath.normpath(path), tree) for path, tree in injected]
    absolute = {path: tree for path, tree in paths if path.startswith("/")}
    relative = {f"/{path}": tree for path, tree in paths if not path.startswith("/") and path != "."}
    contents = [(posixpath.normpath(owner), text) for owner, text in texts]
    mentioned = {
        path: tree
        for path, tree in absolute.items()
        if path not in relative
        and any(owner != path and path[1:] in text and _relative(path, tree).search(text) for owner, text in contents)
    }
    return {path: tree for path, tree in relative.items() if path not in absolute} | mentioned


def uses_tmp(texts: Iterable[tuple[str, str]]) -> bool:
    """Return whether a text of a task uses ``tmp/``, which every image has in its ``/``."""
    return any(_TMP.search(text) for _, text in texts)


_TMP = re.compile(r"(?<![\w./-])(?:\./)?tmp/")


def _relative(path: str, tree: bool) -> re.Pattern[str]:
    """Return a pattern for the relative form of an absolute path.

    For a directory such as ``/data``, it matches ``data`` only before a ``/``, because ``data`` alone may be any word.
    """
    needs_slash = tree and path.count("/") == 1
    return re.compile(r"(?<![\w./-])(?:\./)?" + re.escape(path.lstrip("/")) + ("(?=/)" if needs_slash else _end(tree)))


def _end(tree: bool) -> str:
    """Return a pattern for the end of a path: before text that does not continue it. A directory may be followed by ``/``."""
    return r"(?=/|(?![\w.-]))" if tree else r"(?![\w/-]|\.\w)"


def input_place(position: int) -> str:
    """Return the directory of an entry of ``inputs``, relative to the attempt's directory."""
    return f"input/{position}"


def rewriter(
    ranks: TaskRanks | None,
    world: WorldLayout | None,
    injected: Sequence[tuple[str, bool]],
    inputs: Sequence[InputSpec] = (),
    others: Sequence[DataSpec | EarlierInput] = (),
    hosts: Container[str] | None = None,
    in_work: Container[str] = (),
) -> Rewrite:
    """Return the function that converts a string of the spec to a string of the plan.

    ``injected`` has each absolute path and whether it is a directory; paths in such a directory are replaced, too. ``others``
    are the inputs that do not come from tasks of this workflow. ``hosts`` are the tasks of the group; ``None`` allows any name.
    ``in_work`` has the same meaning as in ``place_of``.
    """
    values = _token_values(ranks, world)
    everything = sorted((*inputs, *others), key=lambda one: one.position, reverse=True)
    # If several entries name one task, its name means the first entry.
    places = {one.task: input_place(one.position) for one in everything if not isinstance(one, DataSpec)}
    places |= {str(one.position): input_place(one.position) for one in everything}

    def token(match: re.Match[str]) -> str:
        name, argument = match.group(1), match.group(2)
        if name == "host" and argument is not None and (hosts is None or argument in hosts):
            return address_of(argument)
        if name == "input" and argument in places:
            return f"{ATTEMPT_DIR}/{places[argument]}"
        return values.get(name, match.group(0)) if argument is None else match.group(0)

    # Longest first, so that /data/train.py is preferred to /data.
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
