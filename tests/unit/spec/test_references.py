"""References ``$(NAME)`` to variables, which are replaced as in Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.spec.model import TaskSpec
from distflow.spec.parse import load_spec_text
from distflow.spec.references import expand

VARIABLES = {"VAR": "value", "EMPTY": "", "NESTED": "$(VAR)"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(VAR)", "value"),
        ("a $(VAR)-$(VAR) b", "a value-value b"),
        ("$(EMPTY)", ""),
        ("$(NESTED)", "$(VAR)"),  # inserted text is not replaced again
        ("$(UNKNOWN) $(date +%s)", "$(UNKNOWN) $(date +%s)"),
        ("$$(VAR)", "$(VAR)"),
        ("$$$(VAR)", "$value"),
        ("$$$$(VAR)", "$$(VAR)"),
        ("$$(echo $(VAR))", "$(echo value)"),
        ("$(echo $(VAR))", "$(echo $(VAR))"),  # the name ends at the first parenthesis
        ("$VAR ${VAR} $(VAR", "$VAR ${VAR} $(VAR"),
        ("echo $$ $$x", "echo $$ $$x"),  # differs from Kubernetes: the process id of a shell
    ],
)
def test_references_are_replaced(text: str, expected: str) -> None:
    assert expand(text, VARIABLES) == expected


SPEC = """\
workflow:
  name: job
  tasks:
  - name: one
    command: [sh, -c, "cat $(FILE)"]
    args: ["$(FILE)", $(LATER), $$(FILE)]
    environment:
      FOLDER: /data
      FILE: $(FOLDER)/x
      EARLY: $(LATER)
      LATER: late
      TOKEN: public
    credentials: {tracker: {API_KEY: key}}
    files:
    - {path: /run.sh, contents: "echo $(FILE)"}
"""


def load(text: str, *set_names: str) -> TaskSpec:
    spec, _ = load_spec_text(text, "spec.yaml", Path("/"), environment_names=set_names)
    return spec.groups[0].tasks[0]


def test_commands_use_all_variables_and_variables_only_those_above_them() -> None:
    task = load(SPEC)
    assert [text.value for text in (*task.command, *task.args)] == [
        "sh", "-c", "cat /data/x", "/data/x", "late", "$(FILE)",
    ]  # fmt: skip
    assert task.environment["FILE"].value == "/data/x"
    assert task.environment["EARLY"].value == "$(LATER)"
    (file,) = task.files
    assert file.contents is not None
    assert file.contents.value == "echo $(FILE)"


@pytest.mark.parametrize("name", ["API_KEY", "TOKEN"])
def test_a_reference_to_a_secret_is_an_error_at_its_line(name: str) -> None:
    with pytest.raises(ProblemsFound) as caught:
        load(SPEC.replace("$(LATER), ", f"$({name}), "), "TOKEN")
    (problem,) = caught.value.problems
    assert problem.where.line == 6
    assert problem.message == f"`$({name})` cannot be replaced: the value of `{name}` is a secret"
