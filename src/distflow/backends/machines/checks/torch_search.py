"""Find out whether a Python on a node has torch, and which other Pythons have it, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.pools.model import is_program
from distflow.runtime.untrusted import decode_object

__all__ = ["FIND_OTHERS", "TORCH_PROBE", "torch_remedy", "valid_pythons", "why_no_torch"]

_MARK = "@@distflow-torch "
_MOST_OTHERS = 3
_LONGEST_PATH = 256

FIND_OTHERS = """
def find_other_pythons():
    import glob, os
    file, found = "lib/python3*/site-packages/torch/distributed/run.py", []
    for folder in ("~/*", "~/.*", "~/*/.venv", "~/*/venv", "~/*/envs/*", "/opt/*", "/opt/*/envs/*"):
        for path in sorted(glob.glob(os.path.join(os.path.expanduser(folder), file))):
            python = os.path.join(path.rsplit("/lib/python3", 1)[0], "bin", "python")
            if os.access(python, os.X_OK) and python not in found:
                found.append(python)
    return found
"""
"""Source of a function for scripts on nodes. It returns Pythons with torch in the usual directories of venvs and conda."""

TORCH_PROBE = f"""
import importlib.util, json, os, sys
{FIND_OTHERS}
spec = importlib.util.find_spec("torch")
folders = list(spec.submodule_search_locations or []) if spec else []
lacks = "" if any(os.path.exists(os.path.join(one, "distributed", "run.py")) for one in folders) else "old" if spec else "none"
answer = {{"executable": sys.executable, "lacks": lacks, "others": find_other_pythons() if lacks else []}}
print("\\n{_MARK}" + json.dumps(answer))
"""
"""Script for the Python of a task. ``why_no_torch`` reads its output."""


def why_no_torch(answer: Mapping[str, Any], *, in_venv: bool = False) -> str:
    """Return why torchrun cannot run, and the remedy. The result is empty if torchrun can run, or if that is unknown.

    ``answer``: the agent's answer to ``run`` with ``TORCH_PROBE``.

    ``in_venv``: the Python belongs to an environment that distflow built.
    """
    line = next((one for one in reversed(str(answer.get("stdout")).splitlines()) if one.startswith(_MARK)), None)
    try:
        found = decode_object(line.removeprefix(_MARK)) if line else {}
    except ValueError:
        return ""
    python, lacks = str(found.get("executable"))[:_LONGEST_PATH], found.get("lacks")
    if lacks not in ("none", "old"):
        return ""
    what, install, in_file = "is not installed", "install it", "add `torch` to"
    if lacks == "old":
        what, install = "has no torchrun (it is older than 1.9, or another package)", "install torch 1.9 or newer"
        in_file = "require `torch>=1.9` in"
    others = valid_pythons(found.get("others"))
    remedy = f"{in_file} the requirements file of `venv`" if in_venv else torch_remedy(others, install)
    return f"torch {what} for {python}; {remedy}"


def valid_pythons(listed: Any) -> tuple[str, ...]:
    """Return the first three valid paths in a node's list of Pythons. The node is not trusted."""
    paths = [path for path in listed if isinstance(path, str)] if isinstance(listed, list) else []
    return tuple(path for path in paths if is_program(path) and len(path) < _LONGEST_PATH)[:_MOST_OTHERS]


def torch_remedy(others: Sequence[str], install: str = "install it") -> str:
    """Return the remedy for a node whose Python has no usable torch. ``others`` are Pythons on the node that have one.

    ``install`` begins the remedy if there are no others.
    """
    path = others[0] if others else "PATH"
    start = f"{path} has it: add `--python {path}`" if others else f"{install}, or name the Python that has it: `--python PATH`"
    return f"{start}, `python={path}` in the hostfile, or `python: {path}` in the pool"
