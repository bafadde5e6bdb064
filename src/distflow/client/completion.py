"""Names for the completion of command lines: of workflows, tasks, groups, metrics, tags, pools, nodes and credentials.

A shell calls these functions whenever the user presses Tab. They import little, read only a part of long lists and logs, create
no files, and do not start a supervisor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.state.directory import find_state_directory

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = [
    "credential_names",
    "group_names",
    "metric_names",
    "newest_ids",
    "node_names",
    "notify_names",
    "pool_names",
    "tag_names",
    "task_names",
]

_NEWEST = 50
_MOST_SAMPLED = 8
"""The maximum number of tasks whose resource samples are read for names of series."""


def newest_ids(client: Client) -> list[str]:
    """Return the ids of the newest workflows, the newest first."""
    return [record.id for record in client.store.list(count=_NEWEST)] if _has_store(client) else []


def task_names(client: Client, workflow: str) -> list[str]:
    """Return the names of a workflow's tasks. Raises ``NotFound`` if the workflow does not exist."""
    record = _find(client, workflow)
    return [task.name for group in record.groups for task in group.tasks] if record else []


def group_names(client: Client, workflow: str) -> list[str]:
    """Return the names of a workflow's groups. Raises ``NotFound`` if the workflow does not exist."""
    record = _find(client, workflow)
    return [group.name for group in record.groups] if record else []


def metric_names(client: Client, workflow: str) -> list[str]:
    """Return the names of the latest metrics and resource samples. Raises ``NotFound`` if the workflow does not exist."""
    from distflow.client.workflows import read_status

    record = _find(client, workflow)
    if record is None:
        return []
    from distflow.client.measurements.samples import find_samples
    from distflow.client.workflows import choose_tasks

    printed = [name for one in read_status(client, record).metrics.values() for name in one.values]
    recorded = find_samples(client, record, choose_tasks(record, [])[:_MOST_SAMPLED], is_recent=True)
    return list(dict.fromkeys([*printed, *(name for one in recorded for name in one.series)]))


def tag_names(client: Client) -> list[str]:
    """Return all tags of workflows."""
    return list(client.store.tags()) if _has_store(client) else []


def pool_names(client: Client) -> list[str]:
    """Return the names of the configured pools. Raises ``ProblemsFound`` if the configuration is wrong."""
    return list(client.configuration(profile=False, names_only=True).pools)


def node_names(client: Client, *, pools: Collection[str] = (), hostfile: str | None = None) -> list[str]:
    """Return the names of the nodes of ``pools``, or of all pools. The hosts of a hostfile are the nodes of the default pool.

    Raises ``ProblemsFound`` if the configuration or the hostfile is wrong.
    """
    from distflow.pools.hostfile import with_hosts

    configuration = with_hosts(client.configuration(profile=False, names_only=True), client.hosts(hostfile))
    chosen = [pool for pool in configuration.pools.values() if not pools or pool.name in pools]
    return list(dict.fromkeys(node.name for pool in chosen for node in pool.nodes))


def credential_names(client: Client) -> list[str]:
    """Return the names of this user's credentials, without reading their values."""
    return sorted(path.stem for path in find_state_directory(client.environ).credentials.glob("*.json"))


def notify_names(client: Client) -> list[str]:
    """Return the names of the targets of notifications in the configuration and the profile."""
    from distflow.state.directory import read_profile

    profile = read_profile(find_state_directory(client.environ).profile).get("notify") or ()
    configured = client.configuration(profile=False, names_only=True).notify
    return [*(one.label for one in configured), *(one.get("name") or one.get("credential") or "" for one in profile)]


def _find(client: Client, workflow: str) -> WorkflowRecord | None:
    return client.store.find(workflow) if _has_store(client) else None


def _has_store(client: Client) -> bool:
    return find_state_directory(client.environ).store.exists()
