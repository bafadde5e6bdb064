"""The credentials of this machine that the tasks of a spec may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.documents.problems import Severity
from distflow.spec.credentials import KnownCredential, check_credentials
from distflow.spec.model import WorkflowSpec
from distflow.spec.parse import load_spec_text

KNOWN = {
    "wandb": KnownCredential(keys=("api_key", "entity")),
    "deploy": KnownCredential(keys=("key",)),
    "store": KnownCredential(keys=("access_key",), unusable_reason="its type is DATA"),
}


def spec_of(*credentials: str) -> WorkflowSpec:
    lines = "".join(f"      {line}\n" for line in credentials)
    text = f"workflow:\n  name: a\n  tasks:\n  - name: t\n    command: [echo]\n    credentials:\n{lines}"
    return load_spec_text(text, "spec.yaml", Path())[0]


def test_existing_credentials_can_be_used() -> None:
    spec = spec_of("wandb: {WANDB_API_KEY: api_key, ENTITY: entity}", "deploy: /run/secrets/deploy")
    assert not check_credentials(spec, KNOWN)
    uses = spec.groups[0].tasks[0].credentials
    assert [(use.name, dict.fromkeys(use.variables), use.directory and use.directory.value) for use in uses] == [
        ("wandb", {"WANDB_API_KEY": None, "ENTITY": None}, None),
        ("deploy", {}, "/run/secrets/deploy"),
    ]


@pytest.mark.parametrize(
    ("entry", "message", "hint"),
    [
        ("wandbb: {A: api_key}", "this machine has no credential `wandbb`", "did you mean `wandb`?"),
        ("wandb: {A: apikey}", "the credential `wandb` has no key `apikey`", "did you mean `api_key`?"),
        ("store: /run/store", "tasks cannot use the credential `store`", "its type is DATA"),
        ("store: {A: access_key}", "tasks cannot use the credential `store`", "its type is DATA"),
    ],
)
def test_a_credential_that_cannot_be_used_is_reported_at_its_line(entry: str, message: str, hint: str) -> None:
    (problem,) = check_credentials(spec_of(entry), KNOWN)
    assert (str(problem.where), problem.message, problem.severity) == ("spec.yaml:7", message, Severity.ERROR)
    assert hint in problem.hint


def test_an_unknown_credential_may_be_a_warning() -> None:
    (problem,) = check_credentials(spec_of("wandb: {A: api_key}"), {}, severity=Severity.WARNING)
    assert problem.severity is Severity.WARNING
    assert problem.hint == "set it: `distflow credential set wandb --payload-file KEY=FILE`"
