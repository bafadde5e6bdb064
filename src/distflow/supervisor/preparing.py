"""Everything that a task's node gets before the start: the launch with its inputs, and the secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from distflow.errors import StateError
from distflow.plan.bind import bind_task
from distflow.plan.credentials import GivenSecrets, given_secrets
from distflow.plan.model import BoundLaunch
from distflow.pools.model import Node
from distflow.state.secrets import gang_token, read_secrets
from distflow.supervisor.carrying import place_data
from distflow.supervisor.checkpointing import place_checkpoints
from distflow.supervisor.commands import Prepare
from distflow.supervisor.handover import place_inputs
from distflow.supervisor.world import Workflow

__all__ = ["launch_of", "secrets_of"]


def launch_of(workflow: Workflow, command: Prepare, nodes: Mapping[str, Node]) -> BoundLaunch | None:
    """Return the complete launch of the task that ``prepare`` names; ``None`` if its group has lost its lease."""
    group, plan = workflow.record.group(command.key.group), workflow.plan.group(command.key.group)
    if group.binding is None:
        return None
    launch = bind_task(
        plan.sized(len(group.tasks)), command.key.task, group.binding, workflow.record.id, nodes, command.key.attempt
    )
    launch = place_inputs(launch, plan.launch(command.key.task).inputs, workflow.record)
    return place_checkpoints(place_data(launch, plan, workflow.record, group), plan, group)


def secrets_of(workflow: Workflow, command: Prepare, folder: Path) -> GivenSecrets:
    """Return that task's secrets from ``folder``. Raises ``StateError`` if they are not there."""
    plan = workflow.plan.group(command.key.group).launch(command.key.task)
    try:
        given = given_secrets(plan, read_secrets(folder, command.key.workflow))
        token = gang_token(folder, f"{command.key.workflow}/{command.key.group}/{command.key.attempt}")
    except (OSError, json.JSONDecodeError) as error:
        raise StateError(f"the values of --set-env and of credentials cannot be read: {error}") from error
    except LookupError as error:
        raise StateError(f"{error.args[0]} is no longer kept; submit the workflow again") from error
    return replace(given, token=token)
