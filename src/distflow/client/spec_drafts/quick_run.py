"""Run a command without a spec: draft the spec from the command line, and fetch the results of the ended workflow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.client.results_directory import results_directories
from distflow.client.spec_drafts.drafts import Draft, HomeIncluded, complete_draft, draft_command
from distflow.client.workflows import find_workflow
from distflow.documents.quantities import count_text
from distflow.errors import InputError
from distflow.pools.hostfile import Host, choose_pool
from distflow.pools.model import Configuration
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.client.outputs import FetchedFiles, OnOutputProgress
    from distflow.state.record import WorkflowRecord

__all__ = ["draft_run", "fetch_results", "unsent_directories"]


def draft_run(
    words: Sequence[str],
    configuration: Configuration,
    *,
    name: str | None = None,
    pool: str | None = None,
    hosts: Sequence[Host] | None = None,
    hostfile: str = "",
    nodes: int | None = None,
    gpus: int | None = None,
    ranks: int | None = None,
    project: Path | None = None,
    results: Path,
    sbatch: Path | None = None,
) -> Draft:
    """Return the draft of a job for a command line and the nodes that it will run on.

    Args:
        words: The command: a Python script, torchrun, or any other program, with its arguments.
        configuration: The pools.
        name: The name of the workflow. Default: the name of the script or program.
        pool: The name of the pool. Default: the default pool.
        hosts: Machines to use instead of the nodes of the pool.
        hostfile: The path of the hostfile, for errors.
        nodes: The number of nodes. Default: that of torchrun's options or of ``sbatch``, or all ``hosts``, or 1.
        gpus: GPUs on each node. Default: see ``complete_draft``.
        ranks: Processes on each node. Default: that of torchrun's options or of ``sbatch``, or one for each GPU, or 1.
        project: The directory to send. Default: the working directory, or for a script elsewhere, its git repository or
            else its directory.
        results: The local directory for the output files. It is not sent.
        sbatch: A script for Slurm's ``sbatch`` with the command and the numbers, instead of ``words`` and ``project``.

    Raises:
        InputError: if there is no command, if it is not valid, or if its number of nodes differs from ``nodes``.
        InputError: if the script is missing or outside the project, if ``project`` is not a directory, or if its default
            contains the home directory.
        InputError: if the number of processes is not known, if there are fewer hosts than nodes, or if the pool cannot use
            ``hosts``.
        InputError: if ``sbatch`` is combined with ``words`` or ``project``.
        NotFound: if the pool does not exist.

    """
    draft = _draft(words, sbatch, project)
    available = choose_pool(configuration, given=pool, hosts=hosts).nodes
    count = nodes or draft.nodes or (len(hosts) if hosts is not None else 1)
    origin = "the command" if sbatch is None else str(sbatch)
    if draft.nodes is not None and count != draft.nodes:
        message = f"{origin} requests {count_text(draft.nodes, 'node')}, but --nodes is {count}"
        change = "`--nnodes` in the command" if sbatch is None else sbatch
        raise InputError(message, hint=f"omit --nodes, or change {change}")
    if hosts is not None and count > len(hosts):
        source = "--nodes" if nodes else origin
        machines = count_text(len(hosts), "machine")
        raise InputError(f"{hostfile} has {machines}, but {source} requests {count}", hint="add machines, or request fewer")
    draft = replace(draft, name=name or draft.name, exclude=_excluded(draft, results))
    return complete_draft(draft, available, count=count, gpus=gpus, ranks=ranks, must_know=True)


def _draft(words: Sequence[str], sbatch: Path | None, project: Path | None) -> Draft:
    if sbatch is None:
        try:
            return draft_command(words, folder=Path.cwd(), project=project)
        except HomeIncluded as error:
            raise InputError(error.message, hint=f"{error.hint}, or name it with --project") from None
    if words or project is not None:
        extra = "a command" if words else "--project"
        raise InputError(f"--from-sbatch and {extra} cannot be combined", hint="remove one of them")
    from distflow.client.spec_drafts.initial_specs import draft_from_sbatch

    return draft_from_sbatch(sbatch, must_exist=True)


def _excluded(draft: Draft, results: Path) -> tuple[str, ...]:
    """Return the patterns for files that are not sent, with the directory of the results if it is in the project."""
    path = os.path.relpath(results, draft.project)
    pattern = f"/{path}"
    is_inside = path.split(os.sep)[0] not in ("..", ".")
    return (pattern, *draft.exclude) if is_inside and pattern not in draft.exclude else draft.exclude


def unsent_directories(draft: Draft, results: Path) -> list[str]:
    """Return the directories of a draft's project that are not sent because they hold results."""
    project = Path(draft.project or ".")
    names = {path for path in (os.path.relpath(results, project),) if results.is_dir() and not path.startswith("..")}
    return sorted({*names, *results_directories(project)} - {"."})


def fetch_results(
    client: Client, record: WorkflowRecord, folder: Path, *, on_progress: OnOutputProgress
) -> FetchedFiles | None:
    """Fetch all output files of an ended workflow into a directory for its results.

    If the directory has the results of another workflow, they are moved to its subdirectory ``earlier-runs`` first.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        folder: The local directory. It is created when there are files to write.
        on_progress: Called with the progress in bytes.

    Returns:
        The counts and errors, or ``None`` if no task has run.

    Raises:
        StorageError: if ``folder`` cannot be created, or if earlier results cannot be moved.

    """
    from distflow.client.outputs import fetch_output_files

    final = find_workflow(client, record.id, report_age=False)
    if not any(task.node is not None and task.output_dir is not None for group in final.groups for task in group.tasks):
        return None
    return fetch_output_files(client, final, folder, is_claimed=True, on_progress=on_progress)
