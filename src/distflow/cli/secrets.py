"""What a workflow is given of this machine's credentials: the check beforehand, and the values at submission."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distflow.documents.problems import Problem, Severity
from distflow.plan.credentials import stored_name
from distflow.plan.model import Plan
from distflow.shell import Secret
from distflow.spec.credentials import KnownCredential, check_credentials
from distflow.spec.model import WorkflowSpec
from distflow.state.credentials import Credential, Credentials, CredentialType
from distflow.state.directory import StateDirectory, find_state_directory

__all__ = ["credential_problems", "gather_secrets"]

_UNFIT: Mapping[CredentialType, str] = {
    CredentialType.GENERIC: "",
    CredentialType.REGISTRY: "its type is REGISTRY, and it is used for images by itself; remove it here",
    CredentialType.DATA: "its type is DATA, and it is used for storage URLs by itself; remove it here",
}


def credential_problems(spec: WorkflowSpec, *, is_tolerant: bool = False) -> Sequence[Problem]:
    """Return what is wrong with the credentials that a spec names, held against those of this machine.

    ``is_tolerant``: that none are there at all (a machine that only checks specs) makes warnings. Raises ``StateError``.
    """
    if not any(task.credentials for group in spec.groups for task in group.tasks):
        return ()
    known = {one.name: _known(one) for one in Credentials(find_state_directory(os.environ).credentials).all()}
    severity = Severity.WARNING if is_tolerant and not known else Severity.ERROR
    return check_credentials(spec, known, severity=severity)


def gather_secrets(plan: Plan, directory: StateDirectory, given: Mapping[str, Secret]) -> dict[str, Secret]:
    """Return every secret that the tasks of a plan get: ``given`` by --set-env, and all of the credentials that they name."""
    names = {one.name for group in plan.groups for launch in group.launches for one in launch.credentials}
    found = [Credentials(directory.credentials).find(name) for name in sorted(names)]
    values = {stored_name(one.name, key): value for one in found if one is not None for key, value in one.payload.items()}
    return {**given, **values}


def _known(one: Credential) -> KnownCredential:
    return KnownCredential(keys=tuple(one.payload), unfit=_UNFIT[one.type])
