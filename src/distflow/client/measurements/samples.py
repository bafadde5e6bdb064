"""Read the resource samples of tasks: their use of CPU, memory, disk, network and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.client.logs import Tasks, log_sources
from distflow.state.samples import ResourceSamples, last_samples, read_samples, thinned

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["ResourceSamples", "find_samples"]


def find_samples(
    client: Client,
    record: WorkflowRecord,
    tasks: Tasks,
    *,
    attempt: int | None = None,
    most: int | None = None,
    is_recent: bool = False,
) -> list[ResourceSamples]:
    """Return the resource samples of tasks, one element for each attempt that has samples.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: The tasks to read (see ``choose_tasks``).
        attempt: Return only samples of this attempt, counted from 0. Default: all attempts.
        most: Return at most this number of samples for each attempt. If it has more, means of consecutive samples are returned.
        is_recent: Whether the last samples are enough. Then only the last 96 KiB of each file are read. If they contain no
            samples, the whole file is read.

    """
    read = last_samples if is_recent else read_samples
    found = [samples for source in log_sources(client, record, tasks, attempt) if (samples := read(source)) is not None]
    return [thinned(samples, most) for samples in found] if most is not None else found
