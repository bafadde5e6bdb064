"""Whether a Python on a node has torch, and which other Pythons there have it, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.pools.model import is_program
from distflow.runtime.untrusted import decode_object

__all__ = ["FIND_OTHERS", "TORCH_PROBE", "other_pythons", "torch_remedy", "why_no_torch"]

_MARK = "@@distflow-torch "
_MOST_OTHERS = 3
_LONGEST_PATH = 256

FIND_OTHERS = """
def other_pythons():
    import glob, os
    file, found = "lib/python3*/site-packages/torch/distributed/run.py", []
    for place in ("~/*", "~/.*", "~/*/.venv", "~/*/venv", "~/*/envs/*", "/opt/*", "/opt/*/envs/*"):
        for path in sorted(glob.glob(os.path.join(os.path.expanduser(place), file))):
            python = os.path.join(path.rsplit("/lib/python3", 1)[0], "bin", "python")
            if os.access(python, os.X_OK) and python not in found:
                found.append(python)
    return found
"""
"""A function for scripts that run on nodes: the Pythons with torch in the usual places of virtual environments and conda."""

TORCH_PROBE = f"""
import importlib.util, json, os, sys
{FIND_OTHERS}
spec = importlib.util.find_spec("torch")
places = list(spec.submodule_search_locations or []) if spec else []
lacks = "" if any(os.path.exists(os.path.join(one, "distributed", "run.py")) for one in places) else "old" if spec else "none"
said = {{"executable": sys.executable, "lacks": lacks, "others": other_pythons() if lacks else []}}
print("\\n{_MARK}" + json.dumps(said))
"""
"""Script for the Python of a task. ``why_no_torch`` reads its output."""


def why_no_torch(said: Mapping[str, Any], *, in_venv: bool = False) -> str:
    """Return why torchrun cannot run, from the answer to ``TORCH_PROBE``; empty if it can, or if that is not known.

    ``in_venv``: the Python is that of an environment that distflow built.
    """
    line = next((one for one in reversed(str(said.get("stdout")).splitlines()) if one.startswith(_MARK)), None)
    try:
        found = decode_object(line.removeprefix(_MARK)) if line else {}
    except ValueError:
        return ""
    python, lacks = str(found.get("executable"))[:_LONGEST_PATH], found.get("lacks")
    if lacks not in ("none", "old"):
        return ""
    what = "is not installed" if lacks == "none" else "has no torchrun (it is older than 1.9, or another package)"
    remedy = "add `torch` to the requirements file of `venv`" if in_venv else torch_remedy(other_pythons(found.get("others")))
    return f"torch {what} for {python}; {remedy}"


def other_pythons(said: Any) -> tuple[str, ...]:
    """Return the plausible paths in a node's list of Pythons that have torch."""
    paths = [path for path in said if isinstance(path, str)] if isinstance(said, list) else []
    return tuple(path for path in paths if is_program(path) and len(path) < _LONGEST_PATH)[:_MOST_OTHERS]


def torch_remedy(others: Sequence[str]) -> str:
    """Return what to do on a node whose Python has no torch, but where these Pythons have it."""
    path = others[0] if others else "PATH"
    start = f"{path} has it: add `--python {path}`" if others else "install it, or name the Python that has it: `--python PATH`"
    return f"{start}, `python={path}` in the hostfile, or `python: {path}` in the pool"
