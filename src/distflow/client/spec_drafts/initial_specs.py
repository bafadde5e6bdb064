"""Write initial specs: from a command, from scripts for other launchers, or as a copy of a sample."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from msgspec import Struct

from distflow.client.spec_drafts.drafts import Draft, complete_draft, draft_command, draft_torchrun, spec_text
from distflow.client.spec_drafts.sbatch import draft_sbatch
from distflow.documents.text import did_you_mean, splitting_problem
from distflow.errors import InputError, NotFound
from distflow.pools.hostfile import choose_pool
from distflow.pools.model import Configuration
from distflow.spec.parse import schema_text
from distflow.structs import replace

__all__ = [
    "Sample",
    "copy_sample",
    "draft_from_command",
    "draft_from_sbatch",
    "draft_from_torchrun",
    "list_samples",
    "write_draft",
    "write_file",
]


def draft_from_command(command: str) -> Draft:
    """Return the draft of a command line such as ``train.py --lr 0.1``. Raises ``InputError``."""
    return draft_command(_split(command, "--command"), folder=Path.cwd(), must_exist=False)


def draft_from_torchrun(command: str) -> Draft:
    """Return the draft of a command line of torchrun, which may begin with ``NAME=value``. Raises ``InputError``."""
    words = _split(command, "--from-torchrun")
    environment = {}
    while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        environment[found[1]] = found[2]
        words.pop(0)
    if draft_torchrun(words) is None:
        hint = 'write the whole command: --from-torchrun "torchrun --nnodes 2 --nproc_per_node 8 train.py"'
        raise InputError(f"`{command}` does not run torchrun", hint=hint)
    return replace(draft_command(words, folder=Path.cwd(), must_exist=False), environment=environment)


def draft_from_sbatch(file: Path, *, must_exist: bool = False) -> Draft:
    """Return the draft of a script for Slurm's ``sbatch``.

    Args:
        file: The script.
        must_exist: Whether a Python script that does not exist is an error. Otherwise it becomes a note.

    Raises:
        InputError: if the file or one of its ``#SBATCH`` lines cannot be read, if it does not start a training, or if the
            project would contain the home directory. With ``must_exist``, also if its Python script does not exist.

    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return draft_sbatch(text, folder=Path.cwd(), must_exist=must_exist)
    except InputError as error:
        raise InputError(f"{file}: {error.message}", hint=error.hint) from None


def _split(command: str, option: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InputError(
            f"{option} has {splitting_problem(error)}",
            hint="write it as in a shell: close every quote, and do not end with a backslash",
        ) from None


def write_draft(
    draft: Draft,
    file: Path,
    configuration: Configuration,
    *,
    count: int | None = None,
    gpus: int | None = None,
    ranks: int | None = None,
    source: str = "",
    force: bool = False,
) -> tuple[Draft, str]:
    """Write a draft as a spec.

    Args:
        draft: The draft.
        file: The path of the spec.
        configuration: The pools.
        count: The number of nodes. Default: that of the draft, or 1.
        gpus: GPUs on each node. Default: that of the draft. Otherwise, for ``--nproc_per_node gpu`` or ``auto``: the number
            that nodes of the default pool have.
        ranks: Processes on each node. Default: that of the draft, or one for each GPU, or 1.
        source: The origin of the draft, for the comment at the top.
        force: Whether to replace an existing file.

    Returns:
        The complete draft, and the command line that submits the spec.

    Raises:
        InputError: if the file exists and ``force`` is not set, or if the file cannot be written.

    """
    is_one_for_each_gpu = draft.ranks_written in ("gpu", "auto")
    nodes = choose_pool(configuration).nodes if is_one_for_each_gpu else ()
    draft = complete_draft(draft, nodes, count=count, gpus=gpus, ranks=ranks)
    if draft.setup:
        note = f"the spec does not prepare the nodes, so each submit needs --setup {shlex.quote(draft.setup)}"
        draft = replace(draft, notes=(*draft.notes, note))
    if draft.project is not None:
        # Paths of a spec are relative to its own directory.
        draft = replace(draft, project=os.path.relpath(draft.project, file.parent))
    heading = [
        f"Written by `distflow init{source}`.",
        f"Check it: distflow workflow validate {file.name}",
        f"Run it: {_submit_command(draft, file.name, configuration)}",
    ]
    write_file(file, spec_text(draft, heading=heading), force=force)
    return draft, _submit_command(draft, str(file), configuration)


def _submit_command(draft: Draft, file: str, configuration: Configuration) -> str:
    """Return the command line that submits a spec, with a pool or a hostfile if the default pool is too small."""
    gpus, default = draft.gpus or 0, configuration.default_pool
    fitting = [
        name
        for name, pool in configuration.pools.items()
        if pool.is_allocated or sum(node.gpus is None or node.gpus >= gpus for node in pool.nodes) >= (draft.nodes or 1)
    ]
    nodes = [] if default in fitting else ["--pool", fitting[0]] if fitting else ["--hostfile", "hosts.txt"]
    setup = ["--setup", draft.setup] if draft.setup else []
    return shlex.join(["distflow", "submit", file, *nodes, *setup, "--wait"])


def write_file(file: Path, text: str, *, force: bool) -> None:
    """Write a file and the directories above it. Raises ``InputError``, without ``force`` also if the file exists."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w" if force else "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError as error:
        if str(error.filename) != str(file):
            raise InputError(
                f"{file} cannot be written: {error.filename} is not a directory", hint="choose another path"
            ) from None
        raise InputError(f"`{file}` exists already", hint="choose another name, or add --force to replace it") from None
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}", hint="choose another path") from error


# -- samples ----------------------------------------------------------------------------------------------------------


_SCHEMA = "workflow.schema.json"


class Sample(Struct, frozen=True, kw_only=True):
    """A spec that comes with distflow."""

    name: str
    description: str
    files: tuple[str, ...]
    """The names of the spec and of the scripts that it sends."""


def list_samples() -> list[Sample]:
    """Return the samples, sorted by name."""
    return [
        Sample(
            name=file.removesuffix(".yaml").replace("_", "-"),
            description=_first_sentence(text),
            files=(file, *sorted(set(re.findall(r"localpath: (\S+)", text)))),
        )
        for file, text in sorted(_texts().items())
        if file.endswith(".yaml")
    ]


def copy_sample(name: str, *, file: Path | None = None, force: bool = False) -> list[Path]:
    """Copy a sample and its scripts. Also write the schema for editors, unless it exists next to the spec.

    Args:
        name: The name of the sample.
        file: The path of the spec. Default: the name of the sample's file, in the working directory. Scripts are written next
            to it.
        force: Whether to replace existing files, except the schema.

    Returns:
        The written files, the spec first.

    Raises:
        NotFound: if the sample does not exist.
        InputError: if a file cannot be written. Without ``force``, also if a file exists; then nothing is written.

    """
    samples = {sample.name: sample for sample in list_samples()}
    sample = samples.get(name.removesuffix(".yaml").replace("_", "-"))
    if sample is None:
        raise NotFound(f"there is no sample `{name}`", hint=did_you_mean(name, samples, what="samples"))
    texts = _texts()
    spec = file or Path(sample.files[0])
    targets = {spec: texts[sample.files[0]].replace(f"workflow_specs/{sample.files[0]}", spec.name)}
    targets |= {spec.parent / script: texts[script] for script in sample.files[1:]}
    schema = spec.parent / _SCHEMA  # the first line of the spec names it
    if not os.path.exists(schema):  # ``Path.exists`` raises an error for a path that cannot be inspected
        targets[schema] = schema_text()
    existing = [str(path) for path in targets if os.path.exists(path)]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        hint = "name a file in another directory, or add --force to replace existing files"
        raise InputError(f"{', '.join(existing)} {verb} already", hint=hint)
    for path, text in targets.items():
        write_file(path, text, force=force)
    return list(targets)


def _texts() -> Mapping[str, str]:
    """Return the texts of all samples and scripts, by the names of their files."""
    folder = resources.files("distflow").joinpath("samples")
    return {one.name: one.read_text(encoding="utf-8") for one in folder.iterdir() if one.name.endswith((".yaml", ".py"))}


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the top of a spec. It begins after the line that names the schema."""
    lines = [line.lstrip("# ") for line in text.splitlines()[1:] if line.startswith("#")]
    paragraph = " ".join(" ".join(lines).split())
    return paragraph.partition(". ")[0].rstrip(".")
