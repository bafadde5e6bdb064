"""Local directories with the results of one workflow. A marker file names the workflow.

A marked directory is not sent with a project. Results of other workflows are moved to its subdirectory ``earlier-runs``.
"""

from __future__ import annotations

import os
from pathlib import Path

from distflow.errors import StorageError
from distflow.spec.files import RESULTS_MARKER
from distflow.state.record import WorkflowRecord

__all__ = ["EARLIER_RUNS", "claim_directory", "directory_problem", "results_directories"]

EARLIER_RUNS = "earlier-runs"
"""The subdirectory of a marked directory with the results of earlier workflows, each in a directory named after its id."""

_TEXT = "{id} {uuid}\nThese are the results of this workflow. distflow does not send a directory with this file to nodes.\n"


def claim_directory(folder: Path, record: WorkflowRecord) -> tuple[bool, Path | None]:
    """Mark a directory as the results of a workflow, and move the results of another workflow aside. Nothing is deleted.

    Returns:
        Whether the directory is marked. A directory that has files and no marker is not marked, because distflow did not fetch
        these files. The second value is the new directory of an earlier workflow's results, or ``None`` if there were none.

    Raises:
        StorageError: if the directory cannot be created or its files cannot be moved.

    """
    marker, text = folder / RESULTS_MARKER, _TEXT.format(id=record.id, uuid=record.uuid)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(os.listdir(folder))
        if RESULTS_MARKER not in names and set(names) - {EARLIER_RUNS}:
            return False, None
        owner = marker.read_text(encoding="utf-8", errors="replace") if RESULTS_MARKER in names else text
        moved = None
        if owner.split()[:2] != text.split()[:2]:
            moved = _unused_path(folder / EARLIER_RUNS, owner)
            moved.mkdir(parents=True)
            # The marker is moved last, so that after an interruption the next call moves the remaining files.
            for name in sorted(set(names) - {EARLIER_RUNS}, key=lambda name: name == RESULTS_MARKER):
                (folder / name).rename(moved / name)
        marker.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write to `{error.filename or folder}`: {directory_problem(error)}"
        raise StorageError(message, hint="choose another directory") from error
    return True, moved


def directory_problem(error: OSError) -> str | None:
    """Return why a directory cannot be created or used."""
    if isinstance(error, FileExistsError):
        return "it is not a directory"
    return "a parent of it is not a directory" if isinstance(error, NotADirectoryError) else error.strerror


def _unused_path(parent: Path, owner: str) -> Path:
    """Return an unused path, named after the workflow in the marker ``owner``, or ``unknown`` if that name is invalid."""
    first = owner.partition(" ")[0]
    name = first if first.replace("-", "").replace("_", "").isalnum() else "unknown"
    number = 1
    while os.path.lexists(path := parent / (name if number == 1 else f"{name}.{number}")):
        number += 1
    return path


def results_directories(project: Path) -> list[str]:
    """Return the names of the directories directly below a project that hold results, and are therefore not sent."""
    with os.scandir(project) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and os.path.lexists(os.path.join(entry.path, RESULTS_MARKER))
        )
