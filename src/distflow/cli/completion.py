"""Completion of values in a shell. Completers never raise an error, and print nothing.

The shells evaluate completions: zsh runs them through ``eval``, and bash expands wildcards in them. A node can send any text as
the name of a metric or task. Completers therefore omit names that do not match ``_SAFE``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from distflow.client.client import Client

__all__ = [
    "Completion",
    "complete_credential",
    "complete_group",
    "complete_metric",
    "complete_node",
    "complete_notify",
    "complete_pool",
    "complete_priority",
    "complete_sample",
    "complete_tag",
    "complete_task",
    "complete_task_status",
    "complete_workflow",
    "complete_workflow_status",
    "repair_zsh_script",
]

_SAFE = r"[A-Za-z0-9_][A-Za-z0-9_./+-]*"


class Completion:
    """A completion with a description, as click expects it."""

    type = "plain"

    def __init__(self, value: str, help: str) -> None:
        """Offer ``value``, which the shell shows with the description ``help``."""
        self.value = value
        self.help = help


def repair_zsh_script() -> None:
    """Change typer's completion script for zsh so that the first press of the Tab key completes, too.

    At the first press, zsh loads the script and expects completions from it. typer's script only registers its function.
    """
    from typer import _completion_shared

    scripts = _completion_shared._completion_scripts  # noqa: SLF001  the scripts have no public name
    register = "compdef %(complete_func)s %(prog_name)s"
    complete = 'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then %(complete_func)s "$@"; fi'
    scripts["zsh"] = scripts["zsh"].replace(f"\n{register}", f"\n{register}\n{complete}")


def _completer(find: Callable[[Client, Mapping[str, Any]], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """Return a completer for the names that ``find`` returns for a client and the values of the other parameters."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from distflow.client.client import Client

        # If the last word is an option without its value, the parser leaves the positional arguments in ``args``.
        params = {**ctx.params, "workflow": ctx.params.get("workflow") or next(iter(ctx.args), "")}
        try:
            with Client() as client:
                names = find(client, params)
                return [name for name in names if name.startswith(incomplete) and re.fullmatch(_SAFE, name)]
        except Exception:  # noqa: BLE001  an error would disturb the shell's prompt
            return []

    return complete


@_completer
def complete_workflow(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete the id of a workflow."""
    from distflow.client.completion import newest_ids

    return newest_ids(client)


@_completer
def complete_task(client: Client, params: Mapping[str, Any]) -> Iterable[str]:
    """Complete the name of a task of the workflow on the command line."""
    from distflow.client.completion import task_names

    return task_names(client, params["workflow"])


@_completer
def complete_group(client: Client, params: Mapping[str, Any]) -> Iterable[str]:
    """Complete the name of a group of the workflow on the command line."""
    from distflow.client.completion import group_names

    return group_names(client, params["workflow"])


@_completer
def complete_metric(client: Client, params: Mapping[str, Any]) -> Iterable[str]:
    """Complete the name of a metric of the workflow on the command line."""
    from distflow.client.completion import metric_names

    return metric_names(client, params["workflow"])


@_completer
def complete_tag(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete a tag that a workflow has."""
    from distflow.client.completion import tag_names

    return tag_names(client)


@_completer
def complete_pool(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete the name of a configured pool."""
    from distflow.client.completion import pool_names

    return pool_names(client)


@_completer
def complete_node(client: Client, params: Mapping[str, Any]) -> Iterable[str]:
    """Complete the name of a node of the named pools, or else of all pools. Hosts of a hostfile replace the default pool's."""
    from distflow.client.completion import node_names

    pools = params.get("pool") or ()
    return node_names(client, pools=[pools] if isinstance(pools, str) else pools, hostfile=params.get("hostfile"))


@_completer
def complete_credential(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete the name of a credential."""
    from distflow.client.completion import credential_names

    return credential_names(client)


@_completer
def complete_notify(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete the name of a target of notifications."""
    from distflow.client.completion import notify_names

    return notify_names(client)


@_completer
def complete_workflow_status(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete a status of workflows."""
    from distflow.lifecycle.states import Reason, WorkflowState, workflow_status_of

    return dict.fromkeys(workflow_status_of(state, reason) for state in WorkflowState for reason in (None, *Reason))


@_completer
def complete_task_status(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete a status of tasks."""
    from distflow.lifecycle.states import Reason, State, status_of

    return dict.fromkeys(status_of(state, reason) for state in State for reason in (None, *Reason))


@_completer
def complete_sample(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete the name of a sample."""
    from distflow.client.spec_drafts.initial_specs import list_samples

    return [sample.name for sample in list_samples()]


@_completer
def complete_priority(client: Client, params: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """Complete a priority."""
    return ("HIGH", "NORMAL", "LOW")
