"""The Python API of distflow: typed functions that the command line and other programs call.

Most functions take a ``Client`` first. They return frozen values or iterators, and raise the errors of ``distflow.errors``.
They do not print, parse arguments or exit the process. They report progress and warnings through callbacks. ::

    from distflow.client import Client, SubmitRequest, find_workflow, plan, submit, wait

    with Client(notify=print) as client:
        record = submit(client, plan(client, SubmitRequest(spec="train.yaml")))
        (record,) = wait(client, [record.id])

A name's module is imported when the name is first used, so a program loads only the modules that it needs.

Every function that takes a ``Client`` can also raise ``StateError`` if the state directory or the store cannot be used, and
``ProblemsFound`` or ``InputError`` if it reads the configuration and the configuration is wrong. The docstrings list the other
errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.client.adoption import adopt
    from distflow.client.client import Client
    from distflow.client.credentials import delete_credential, list_credentials, set_credential
    from distflow.client.data import check_data_access, delete_data, download_data, list_data, upload_data
    from distflow.client.datasets import create_version, delete_versions, download_dataset, list_datasets, read_versions
    from distflow.client.failures import diagnose_groups, explain_failures
    from distflow.client.logs import stream_logs
    from distflow.client.metrics import find_metrics
    from distflow.client.nodes import choose_nodes, clean_nodes, reap_nodes, uninstall_nodes
    from distflow.client.pools import check_pool, list_nodes, list_pools, prefer_pool
    from distflow.client.port_forwarding import forward_ports
    from distflow.client.rsync.copies import rsync_with_task, start_sync, stop_syncs
    from distflow.client.running_tasks import find_running_task, read_stacks, run_on_tasks
    from distflow.client.submitting.restarting import plan_restart, restart
    from distflow.client.submitting.specs import Overrides, check_spec, validate
    from distflow.client.submitting.submission import SubmitRequest, plan, submit
    from distflow.client.tasks import list_tasks
    from distflow.client.workflows import (
        cancel,
        change_tags,
        choose_tasks,
        find_workflow,
        list_workflows,
        read_events,
        read_spec,
        read_status,
        wait,
    )

__all__ = [
    "Client",
    "Overrides",
    "SubmitRequest",
    "adopt",
    "cancel",
    "change_tags",
    "check_data_access",
    "check_pool",
    "check_spec",
    "choose_nodes",
    "choose_tasks",
    "clean_nodes",
    "create_version",
    "delete_credential",
    "delete_data",
    "delete_versions",
    "diagnose_groups",
    "download_data",
    "download_dataset",
    "explain_failures",
    "find_metrics",
    "find_running_task",
    "find_workflow",
    "forward_ports",
    "list_credentials",
    "list_data",
    "list_datasets",
    "list_nodes",
    "list_pools",
    "list_tasks",
    "list_workflows",
    "plan",
    "plan_restart",
    "prefer_pool",
    "read_events",
    "read_spec",
    "read_stacks",
    "read_status",
    "read_versions",
    "reap_nodes",
    "restart",
    "rsync_with_task",
    "run_on_tasks",
    "set_credential",
    "start_sync",
    "stop_syncs",
    "stream_logs",
    "submit",
    "uninstall_nodes",
    "upload_data",
    "validate",
    "wait",
]

_MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adoption": ("adopt",),
        "client": ("Client",),
        "credentials": ("delete_credential", "list_credentials", "set_credential"),
        "data": ("check_data_access", "delete_data", "download_data", "list_data", "upload_data"),
        "datasets": ("create_version", "delete_versions", "download_dataset", "list_datasets", "read_versions"),
        "failures": ("diagnose_groups", "explain_failures"),
        "logs": ("stream_logs",),
        "metrics": ("find_metrics",),
        "nodes": ("choose_nodes", "clean_nodes", "reap_nodes", "uninstall_nodes"),
        "pools": ("check_pool", "list_nodes", "list_pools", "prefer_pool"),
        "port_forwarding": ("forward_ports",),
        "submitting.restarting": ("plan_restart", "restart"),
        "rsync.copies": ("rsync_with_task", "start_sync", "stop_syncs"),
        "running_tasks": ("find_running_task", "read_stacks", "run_on_tasks"),
        "submitting.specs": ("Overrides", "check_spec", "validate"),
        "submitting.submission": ("SubmitRequest", "plan", "submit"),
        "tasks": ("list_tasks",),
        "workflows": (
            "cancel",
            "change_tags",
            "choose_tasks",
            "find_workflow",
            "list_workflows",
            "read_events",
            "read_spec",
            "read_status",
            "wait",
        ),
    }
)  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a name's module when the name is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found
