"""Submitting a workflow's stored spec again: what is taken from it, and what must be given anew."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.cli import wiring
from distflow.cli.reading import reading_directory
from distflow.cli.submission import Checked, Overrides, check_again
from distflow.errors import InputError
from distflow.pools.choose import choose_pool
from distflow.pools.hostfile import Host
from distflow.pools.model import Configuration, Pool
from distflow.state.record import WorkflowRecord

__all__ = ["Earlier", "earlier"]

_ID = re.compile(r"[A-Za-z].*-[0-9]+|[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A workflow that was submitted before."""

    record: WorkflowRecord
    checked: Checked
    _pool: Pool

    def pool(self, configuration: Configuration, given: str | None, hosts: Sequence[Host] | None) -> Pool:
        """Return the pool that is named, else its own: as the configuration has it now, or as it was where that is gone."""
        if given is None and hosts is None:
            return configuration.pools.get(self.record.pool, self._pool)
        wanted = self.record.pool if self.record.pool in configuration.pools else None
        return choose_pool(configuration, given=given, wanted=wanted, hosts=hosts)


def earlier(file: str, overrides: Overrides) -> Earlier | None:
    """Return the workflow that is meant where a spec is named, or ``None`` when it is a file: files come first.

    Raises ``NotFound``, ``ProblemsFound``, and ``InputError`` where the command line asks for what a stored spec cannot do.
    """
    if os.path.exists(file) or not _ID.fullmatch(file):
        return None
    with wiring.open_store(reading_directory()) as store:
        record = store.find(file)
        text, template = (store.document(record.uuid, kind) for kind in ("spec", "template"))
        folder, pool, plan = store.folder(record.uuid), store.pool(record.uuid), store.plan(record.uuid)
    if overrides.sets or overrides.set_strings:
        hint = f"get the template with `distflow workflow spec {record.id} --template`, and submit that"
        raise InputError(f"the values of {record.id} are filled in already: --set has no effect", hint=hint)
    secrets = {name: None for group in plan.groups for launch in group.launches for name in launch.secret_names}
    _check_secrets(record, [name for name in secrets if name not in overrides.secrets])
    checked = check_again(record.id, text, template, Path(folder) if folder else Path.cwd(), overrides)
    return Earlier(record=record, checked=checked, _pool=pool)


def _check_secrets(record: WorkflowRecord, missing: Sequence[str]) -> None:
    if missing:
        flags = " ".join(f"--set-env {name}=…" for name in missing)
        raise InputError(
            f"{record.id} had {' and '.join(missing)} from --set-env, which is not kept", hint=f"give it again: {flags}"
        )
