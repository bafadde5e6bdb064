"""Check a pool on Ray: the cluster, its resources, and the Python on its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distflow.backends.allocated.ray.program import ClusterProgram, unreadable_answer
from distflow.backends.machines.checks.findings import Finding, count, error, note, warning
from distflow.backends.machines.checks.measured import python_trouble
from distflow.documents.quantities import bytes_text
from distflow.documents.text import few, listed, plain
from distflow.pools.model import Pool, RaySettings, ssh_node

__all__ = ["check_ray"]

_PROBE_S = 90.0


def check_ray(pool: Pool, login: str, program: ClusterProgram, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Yield the findings. Each node runs a short Ray task without resources, and no placement group is created.

    Raises ``NodeUnreachable`` if Ray does not answer, or if its answer cannot be read.
    """
    settings, template = pool.ray or RaySettings(), pool.template or ssh_node()
    progress("querying Ray's nodes")
    nodes = program.ask("nodes")
    try:
        yield from _cluster(login, settings, program.versions, [one for one in nodes if one["is_alive"]])
        progress("running Python on each node")
        for one in program.ask("probe", timeout_s=_PROBE_S, python=template.python, root=template.root):
            yield from _python(template.python, template.root, one)
    except (KeyError, TypeError, ValueError, AttributeError) as malformed:
        raise unreadable_answer(login, malformed) from malformed


def _cluster(
    login: str, settings: RaySettings, versions: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    at = (login,)
    yield note("ray", at, f"Ray {plain(str(versions.get('ray', '')))} with Python {plain(str(versions.get('python', '')))}", "")
    if not nodes:
        yield error("ray", at, "the cluster has no node", "start nodes with `ray start --address=…`")
        return
    totals = {name: sum(float(one["total"][name]) for one in nodes) for name in ("CPU", "GPU", "memory")}
    yield note(
        "ray", at, f"{count(len(nodes), 'node')} with {_amount(totals['CPU'], 'CPU')}, {_amount(totals['GPU'], 'GPU')} and"
        f" {bytes_text(int(totals['memory']))} memory: {few([plain(str(one['name'])) for one in nodes])}", "",
    )  # fmt: skip
    if not totals["GPU"]:
        yield warning(
            "gpus", at, "no node of the cluster has GPUs",
            "tasks that request GPUs cannot run; `ray start --num-gpus` declares GPUs that Ray does not find",
        )  # fmt: skip
    others = {str(name) for one in nodes for name in one["others"]}
    for name, platform in settings.platforms.items():
        missing = [one for one in platform.resources if one not in others]
        if missing:
            known = f"the nodes have {listed(sorted(map(plain, others)))}" if others else "the nodes have no custom resources"
            yield error(
                "ray",
                at,
                f"no node has {' or '.join(f'`{plain(one)}`' for one in missing)}, which platform `{name}` needs",
                f"{known}: change `platforms` of the pool",
            )
    names = [str(one["name"]) for one in nodes]
    duplicates = sorted({plain(name) for name in names if names.count(name) > 1})
    if duplicates:
        yield warning(
            "name", at, f"several nodes have the same name: {listed(duplicates)}",
            "give each node its own name with `ray start --node-name`",
        )  # fmt: skip


def _amount(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"


def _python(python: str, root: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    at = (plain(str(found["node"])),)
    if "error" in found:
        yield error(
            "ray", at, f"Ray could not run a task: {plain(str(found['error']))[:300]}", "check the log of Ray on that node"
        )
        return
    output = plain(str(found["output"]))
    if found["code"] != 0:
        yield error(
            "python", at, f"`{python}` does not run: {output[:300] or 'no message'}",
            "set `python` of the pool to a Python that exists on all nodes",
        )  # fmt: skip
    elif trouble := python_trouble(0, output):
        yield error("python", at, f"`{python}` {plain(trouble)}", "set `python` of the pool to a newer Python")
    else:
        yield note("python", at, f"`{python}` is Python {output}", "")
    if not found["is_writable"]:
        yield error(
            "root",
            at,
            f"`{root}` is not writable or cannot be created",
            "set `root` of the pool to a directory that Ray's user may write",
        )
