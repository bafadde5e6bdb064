"""Typed functions that the command line, ``import distflow`` and other programs call.

Most functions take a ``Client`` first, and return frozen objects, collections of them, or iterators. They raise the errors of
``distflow.errors``. They do not parse arguments or exit the process. They report progress and warnings through callbacks. ::

    from distflow.client import Client, SubmitRequest, find_workflow, plan, submit, wait

    with Client(notify=print) as client:
        record = submit(client, plan(client, SubmitRequest(spec="train.yaml")))
        (record,) = wait(client, [record.id])

A name's module is imported when the name is first used, so a program loads only the modules that it needs.

Every function that takes a ``Client`` can also raise ``StateError`` if the state directory or the store cannot be used. A
function that reads the configuration can raise ``ProblemsFound`` or ``InputError`` if the configuration is wrong. The
docstrings list other errors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.client.adoption import adopt
    from distflow.client.client import Client
    from distflow.client.credentials import delete_credential, list_credentials, set_credential
    from distflow.client.data import (
        check_data_access,
        create_version,
        delete_data,
        delete_versions,
        download_data,
        download_dataset,
        list_data,
        list_datasets,
        read_versions,
        upload_data,
    )
    from distflow.client.export import export_to_kubernetes, export_to_osmo, export_to_slurm
    from distflow.client.failures import diagnose_groups, explain_failures
    from distflow.client.logs import stream_logs
    from distflow.client.measurements.metrics import find_metrics
    from distflow.client.measurements.samples import find_samples
    from distflow.client.nodes import choose_nodes, clean_nodes, reap_jobs, reap_nodes, uninstall_nodes
    from distflow.client.notifications.delivery import send_test_notification
    from distflow.client.notifications.targets import set_profile_notify
    from distflow.client.outputs import fetch_output_files, list_output_files
    from distflow.client.pools import check_pool, list_nodes, list_pools, prefer_pool
    from distflow.client.rsync.copies import rsync_with_task, start_sync, stop_syncs
    from distflow.client.running_tasks import find_running_task, forward_ports, read_stacks, run_on_tasks
    from distflow.client.spec_drafts.drafts import spec_text
    from distflow.client.spec_drafts.quick_run import draft_run, fetch_results
    from distflow.client.specs import Overrides, check_spec, find_notify_targets, validate
    from distflow.client.submission import SubmitRequest, plan, plan_restart, restart, submit
    from distflow.client.workflows import (
        cancel,
        change_tags,
        choose_tasks,
        find_workflow,
        list_tasks,
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
    "draft_run",
    "explain_failures",
    "export_to_kubernetes",
    "export_to_osmo",
    "export_to_slurm",
    "fetch_output_files",
    "fetch_results",
    "find_metrics",
    "find_notify_targets",
    "find_running_task",
    "find_samples",
    "find_workflow",
    "forward_ports",
    "list_credentials",
    "list_data",
    "list_datasets",
    "list_nodes",
    "list_output_files",
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
    "reap_jobs",
    "reap_nodes",
    "restart",
    "rsync_with_task",
    "run_on_tasks",
    "send_test_notification",
    "set_credential",
    "set_profile_notify",
    "spec_text",
    "start_sync",
    "stop_syncs",
    "stream_logs",
    "submit",
    "uninstall_nodes",
    "upload_data",
    "validate",
    "wait",
]


@cache
def _modules() -> Mapping[str, str]:
    """Return the module of each public name, read from the imports for type checkers at the top of this file."""
    import ast
    import inspect

    imports = [
        node for node in ast.walk(ast.parse(inspect.getsource(sys.modules[__name__]))) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: node.module or "" for node in imports for alias in node.names if alias.name in __all__}


def __dir__() -> tuple[str, ...]:
    """Return all public names, including names that have not been imported yet, so that ``help`` describes them."""
    return (*globals(), *__all__)


def __getattr__(name: str) -> object:
    """Import a name's module when the name is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_modules()[name]), name)
    globals()[name] = found
    return found
