"""Read a strategy block into a draft: kind, mesh and options. This module does no I/O.

distflow's own form is ``{kind: hybrid, mesh_shape: [[2, 2], [fsdp, tp]], mixed_precision: bf16}``, where each key
is optional and options stand next to ``kind``. Blocks that were copied from other guides are converted, with a warning that
shows the result (``layout.strategy.model.group_strategy``):

* tunix: ``mesh: {shape: "(2, 2)", axis_names: "('fsdp', 'tp')"}``, and ``shape`` and ``axis_names`` without ``mesh``
* ``DISTFLOW_STRATEGY``: ``{kind, mesh: {shape, names}, options: {…}}``
* NeMo RL: ``cluster:`` with ``fsdp_config:`` or ``pipeline_config:``, ``training:``, and ``model:`` with ``mesh_shape:``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from distflow.documents.document import Path, path_text
from distflow.documents.problems import Mark, Problem, Severity
from distflow.documents.text import did_you_mean
from distflow.train.strategies.options import MESH_SIZES, OPTIONS

__all__ = ["AXES", "FOREIGN_KEYS", "LocatedValue", "StrategyDraft", "read_block"]

AXES = {
    "dp": "dp", "data": "dp", "replicate": "dp", "dp_replicate": "dp", "fsdp": "fsdp", "shard": "fsdp", "dp_shard": "fsdp",
    "cp": "cp", "tp": "tp", "pp": "pp",
}  # fmt: skip
"""Name of a mesh axis in specs, torchtitan, accelerate or other guides → its name in distflow."""

_CLUSTER_KINDS = {"ray": "ddp", "ddp": "ddp", "fsdp": "fsdp", "tp": "tp", "pipeline": "pipeline"}
_CLUSTER_KEYS = (
    "name", "num_workers", "num_nodes", "num_gpus", "gpus_per_node", "resources_per_worker", "resources", "placement_group",
    "timeout", "fsdp_config", "pipeline_config",
)  # fmt: skip
_TRAINING = {
    "batch_size": "global_batch_size",
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "sync_gradients_every": "sync_gradients_every",
    "mixed_precision": "mixed_precision",
}
_PIPELINE = {
    "stages": "stages",
    "schedule": "schedule",
    "micro_batch_size": "micro_batch_size",
    "micro_batches": "micro_batches",
    "gradient_accumulation_steps": "micro_batches",
}
FOREIGN_KEYS = ("mesh", "shape", "axis_names", "options", "cluster", "training", "model")
"""The keys of blocks that are converted."""


class LocatedValue(Struct, frozen=True):
    """A value and its path in the document."""

    value: object
    path: Path


class StrategyDraft(Struct):
    """A block as it was written, before its parts are checked against each other."""

    path: Path
    """The path of the block itself."""
    locate: Callable[[Path], Mark]
    """Returns the position of a path in the document."""
    kind: LocatedValue | None = None
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    mesh_path: Path = ()
    """The path of the mesh; empty if there is none."""
    options: dict[str, LocatedValue] = field(default_factory=dict)
    worlds: list[LocatedValue] = field(default_factory=list)
    """The total number of ranks, each time that the block states it."""
    sizes: LocatedValue | None = None
    """The number of ranks of each task, as a list, if the block states them."""
    placement: LocatedValue | None = None
    """The requested placement of ranks on nodes, in Ray's terms."""
    problems: list[Problem] = field(default_factory=list)

    def add(self, path: Path, message: str, hint: str = "", *, severity: Severity = Severity.ERROR) -> None:
        """Report a finding at a path."""
        where = self.locate(path)
        self.problems.append(Problem(where=where, path=path_text(path), message=message, hint=hint, severity=severity))

    def set_option(self, name: str, value: object, path: Path) -> None:
        """Set an option; a second, different value is a problem."""
        before = self.options.get(name)
        if before is not None and before.value != value:
            at = path_text(before.path)
            self.add(
                path,
                f"`{path[-1]}` is {value!r}, but `{at}` is {before.value!r}, and both set the same option",
                "keep one of them",
            )
            return
        self.options[name] = LocatedValue(value, path)

    def set_kind(self, kind: object, path: Path) -> None:
        """Set the kind; a second, different one is a problem."""
        if self.kind is not None and self.kind.value != kind:
            at = path_text(self.kind.path)
            self.add(path, f"`{path[-1]}` means {kind}, but `{at}` means {self.kind.value}", "keep one of them")
            return
        self.kind = LocatedValue(kind, path)


def read_block(block: Mapping[str, object], path: Path, locate: Callable[[Path], Mark]) -> StrategyDraft:
    """Read a strategy block. The problems of the draft include unknown keys and malformed values."""
    draft = StrategyDraft(path, locate)
    known = ("kind", "mesh_shape", *OPTIONS, *MESH_SIZES)
    for key, value in block.items():
        here = (*path, key)
        if key == "kind":
            draft.set_kind(value.lower() if isinstance(value, str) else value, here)
        elif key in ("mesh", "mesh_shape"):
            _mesh(draft, value, here)
        elif key in OPTIONS or key in MESH_SIZES:
            draft.set_option(key, value, here)
        elif key not in FOREIGN_KEYS:
            draft.add(here, f"`{key}` is not a key of a strategy", did_you_mean(key, known, what="keys"))
    if "shape" in block or "axis_names" in block:
        _axes(draft, block.get("shape"), block.get("axis_names"), (*path, "shape" if "shape" in block else "axis_names"))
    for name, read in (("options", _options), ("cluster", _cluster), ("model", _model), ("training", _training)):
        if name in block and (inner := _mapping(draft, block[name], (*path, name))) is not None:
            read(draft, inner, (*path, name))
    return draft


# -- meshes -----------------------------------------------------------------------------------------------------------

_MESH_HINT = 'write mesh_shape: [[2, 2], ["fsdp", "tp"]]: the sizes, then as many names'


def _mesh(draft: StrategyDraft, value: object, path: Path) -> None:
    if isinstance(value, Mapping):
        for key in value:
            if key not in ("shape", "axis_names", "names"):
                hint = did_you_mean(str(key), ["shape", "axis_names"], what="keys")
                draft.add((*path, key), f"`{key}` is not a key of a mesh", hint)
        _axes(draft, value.get("shape"), value.get("names", value.get("axis_names")), path)
        return
    if isinstance(value, str):
        groups = re.findall(r"[\[(]([^\[\]()]*)[\])]", value)
        value = groups if len(groups) == 2 else value
    if isinstance(value, list | tuple) and len(value) == 2 and not any(isinstance(part, int) for part in value):
        _axes(draft, value[0], value[1], path)
    else:
        draft.add(path, f"{value!r} is not a mesh", _MESH_HINT)


def _axes(draft: StrategyDraft, shape: object, names: object, path: Path) -> None:
    """Set the sizes and names, from lists or from text such as ``"(2, 2)"`` and ``"('fsdp', 'tp')"``."""
    sizes = [int(word) if word.isdecimal() else word for word in _words(shape)]
    words = _words(names)
    if not sizes or not words or len(sizes) != len(words):
        draft.add(path, f"the mesh needs sizes and equally many names, but has {shape!r} and {names!r}", _MESH_HINT)
        return
    if bad := [size for size in sizes if not isinstance(size, int) or size < 1]:
        draft.add(path, f"`{bad[0]}` is not a valid size of a mesh axis", "sizes are whole numbers of at least 1")
        return
    for word in words:
        if word not in AXES:
            draft.add(path, f"`{word}` is not a known mesh axis", did_you_mean(word, AXES, what="axes"))
            return
    axes = tuple(AXES[word] for word in words)
    if len(set(axes)) < len(axes):
        draft.add(path, f"the mesh has an axis twice: {', '.join(words)}", "write each axis once")
        return
    if draft.mesh_path:
        draft.add(path, f"the mesh is also in `{path_text(draft.mesh_path)}`", "keep one of them")
        return
    draft.shape, draft.names, draft.mesh_path = tuple(size for size in sizes if isinstance(size, int)), axes, path


def _words(value: object) -> list[str]:
    """Return the items of a list, or of a list written as text; nothing for any other value."""
    if isinstance(value, str):
        value = [word for word in (part.strip(" \t'\"") for part in value.strip("[]() \t").split(",")) if word]
    if not isinstance(value, Sequence):
        return []
    return [str(word) for word in value]


# -- options of DISTFLOW_STRATEGY, and NeMo RL's blocks --------------------------------------------------------------


def _options(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    for key, value in block.items():
        _known_option(draft, key, value, (*path, key), [*OPTIONS, *MESH_SIZES])


def _cluster(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    for key in block:
        if key not in _CLUSTER_KEYS:
            draft.add((*path, key), f"`{key}` is not a key of `cluster`", did_you_mean(key, _CLUSTER_KEYS, what="keys"))
    name = str(block.get("name", "ray"))
    if name not in _CLUSTER_KINDS:
        hint = did_you_mean(name, _CLUSTER_KINDS, what="names")
        draft.add((*path, "name"), f"`{name}` is not a known `name` of `cluster`", hint)
    else:
        draft.set_kind(_CLUSTER_KINDS[name], (*path, "name") if "name" in block else path)
    _claims(draft, block, path)
    for key, read in (("fsdp_config", _fsdp), ("pipeline_config", _pipeline)):
        if key in block and (inner := _mapping(draft, block[key], (*path, key))) is not None:
            read(draft, inner, (*path, key))
    if "timeout" in block:
        draft.set_option("timeout_s", block["timeout"], (*path, "timeout"))
    if (
        "placement_group" in block
        and (group := _mapping(draft, block["placement_group"], (*path, "placement_group"))) is not None
    ):
        here = (*path, "placement_group")
        for key in group:
            if key != "strategy":
                hint = (
                    "write the needs of the tasks in `resources`; tasks of a world get separate nodes, except in a local pool"
                )
                draft.add((*here, key), f"`{key}` of `placement_group` is not supported", hint)
        if "strategy" in group:
            draft.placement = LocatedValue(group["strategy"], (*here, "strategy"))


def _claims(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    """Store the numbers of ranks that a ``cluster`` block states, and report invalid ones."""
    counts: dict[str, int] = {}
    for key in ("num_workers", "num_nodes", "num_gpus", "gpus_per_node"):
        value = block.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            counts[key] = value
        elif key in block:
            draft.add(
                (*path, key),
                f"`{key}` is {value!r}, which is not a positive whole number",
                "write a whole number of at least 1",
            )
    if "num_gpus" in counts:
        draft.worlds.append(LocatedValue(counts["num_gpus"], (*path, "num_gpus")))
    if "num_workers" in counts:
        draft.worlds.append(LocatedValue(counts["num_workers"], (*path, "num_workers")))
    if "gpus_per_node" in counts and "num_nodes" in counts:
        draft.sizes = LocatedValue([counts["gpus_per_node"]] * counts["num_nodes"], (*path, "gpus_per_node"))
    each = block.get("resources_per_worker")
    gpus = each.get("GPU", 1) if isinstance(each, Mapping) else 1
    if gpus != 1:
        where = (*path, "resources_per_worker", "GPU")
        message = f"each worker gets {gpus} GPUs, but a rank has exactly one GPU"
        draft.add(where, message, "write GPU: 1, and set num_workers to the number of GPUs")
    resources = block.get("resources")
    if resources is not None:
        sizes = [item.get("GPU") for item in resources if isinstance(item, Mapping)] if isinstance(resources, list) else []
        if sizes and all(isinstance(size, int) and size >= 1 for size in sizes):
            draft.sizes = LocatedValue(sizes, (*path, "resources"))
        else:
            draft.add(
                (*path, "resources"),
                "`resources` must be a list with the GPUs of each task",
                "write an item such as `- {GPU: 1, CPU: 4}` for each task",
            )


def _fsdp(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    known = [name for name, option in OPTIONS.items() if "fsdp" in option.kinds]
    for key, value in block.items():
        _known_option(draft, key, value, (*path, key), known)


def _pipeline(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    for key, value in block.items():
        _known_option(draft, key, value, (*path, key), _PIPELINE, _PIPELINE.get(key, key))


def _training(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    piped = draft.kind is not None and draft.kind.value == "pipeline"
    replicated = draft.kind.value == "ddp" if draft.kind is not None else not draft.mesh_path
    for key, value in block.items():
        here = (*path, key)
        if key == "profile_communication":
            if value:
                message = "`profile_communication` has no effect, because distflow does not start the profiler"
                hint = "remove it, and run a step under torch.profiler, which reports the times of collectives"
                draft.add(here, message, hint)
            continue
        name = _TRAINING.get(key, key)
        if piped and key == "gradient_accumulation_steps":
            name = "micro_batches"
        if replicated and key == "mixed_precision":
            # In NeMo RL's blocks, this option lowers the precision of communication.
            name, value = "compression", {True: "bf16", False: "none"}.get(value, value) if isinstance(value, bool) else value  # noqa: PLW2901
        _known_option(draft, key, value, here, _TRAINING, name)


def _model(draft: StrategyDraft, block: Mapping[str, object], path: Path) -> None:
    for key, value in block.items():
        if key in ("mesh_shape", "mesh"):
            _mesh(draft, value, (*path, key))
        else:
            message = f"`model.{key}` has no effect: distflow reads only `mesh_shape` of `model`"
            draft.add((*path, key), message, "pass it to your program as an argument", severity=Severity.WARNING)


def _known_option(
    draft: StrategyDraft, key: str, value: object, path: Path, known: Sequence[str] | Mapping[str, str], name: str = ""
) -> None:
    if key in known:
        draft.set_option(name or key, value, path)
    else:
        draft.add(path, f"`{key}` is not a key of `{path[-2]}`", did_you_mean(str(key), known, what="keys"))


def _mapping(draft: StrategyDraft, value: object, path: Path) -> Mapping[str, object] | None:
    if isinstance(value, Mapping):
        return value
    draft.add(path, f"`{path[-1]}` is {value!r}, which is not a mapping", "write keys and values below it")
    return None
