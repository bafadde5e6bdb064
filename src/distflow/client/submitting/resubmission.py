"""Find the stored spec of a workflow to submit it again, and check that its secrets are given again."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.client.client import Client
from distflow.client.submitting.specs import CheckedSpec, Overrides, check_stored_spec
from distflow.errors import InputError
from distflow.pools.hostfile import Host, choose_pool
from distflow.pools.model import Configuration, Pool
from distflow.state.record import WorkflowRecord

__all__ = ["PreviousWorkflow", "find_previous"]

_ID = re.compile(r"[A-Za-z].*-[0-9]+|[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousWorkflow:
    """A workflow that was submitted before."""

    record: WorkflowRecord
    checked: CheckedSpec
    pool: Pool
    """The pool as configured when the workflow was submitted."""

    def choose_pool(self, configuration: Configuration, given: str | None, hosts: Sequence[Host] | None) -> Pool:
        """Return the pool for the new workflow.

        Args:
            configuration: The current pools.
            given: The name of a pool.
            hosts: Machines to use instead of a configured pool.

        Returns:
            The given pool, or else the pool of the previous workflow: as configured now, or as configured then if the
            configuration no longer has it.

        Raises:
            NotFound: if the given pool does not exist.

        """
        if given is None and hosts is None:
            return configuration.pools.get(self.record.pool, self.pool)
        wanted = self.record.pool if self.record.pool in configuration.pools else None
        return choose_pool(configuration, given=given, wanted=wanted, hosts=hosts)


def find_previous(client: Client, name: str, overrides: Overrides) -> PreviousWorkflow | None:
    """Return the workflow with this id or uuid, after checking its spec again.

    Args:
        client: The client whose store has the workflow.
        name: An id, a uuid, or the path of a spec file.
        overrides: The secrets of the workflow, which must be given again.

    Returns:
        The workflow, or ``None`` if a file of this name exists or the name does not look like an id.

    Raises:
        InputError: if a secret is missing, or if the overrides set template variables, which a stored spec no longer has.
        NotFound: if the workflow does not exist.
        ProblemsFound: if the spec is no longer valid.

    """
    if os.path.exists(name) or not _ID.fullmatch(name):
        return None
    store = client.store
    record = store.find(name)
    text, template = (store.document(record.uuid, kind) for kind in ("spec", "template"))
    folder, pool, plan = store.folder(record.uuid), store.pool(record.uuid), store.plan(record.uuid)
    if overrides.sets or overrides.set_strings:
        hint = f"get the template with `distflow workflow spec {record.id} --template`, and submit that"
        raise InputError(f"the values of {record.id} are filled in already: --set has no effect", hint=hint)
    secrets = {name: None for group in plan.groups for launch in group.launches for name in launch.secret_names}
    _check_secrets(record, [name for name in secrets if name not in overrides.secrets])
    checked = check_stored_spec(client, record.id, text, template, Path(folder) if folder else Path.cwd(), overrides)
    return PreviousWorkflow(record=record, checked=checked, pool=pool)


def _check_secrets(record: WorkflowRecord, missing: Sequence[str]) -> None:
    if missing:
        flags = " ".join(f"--set-env {name}=…" for name in missing)
        raise InputError(
            f"{record.id} had {' and '.join(missing)} from --set-env, which is not kept", hint=f"give it again: {flags}"
        )
