"""Invalid specs, and all messages about them. Also every spec of a test with one wrong value.

Each ``goldens/problems/spec_*.yaml`` breaks a rule (some break many of one kind). The messages are in the ``.txt`` file of the
same name. ``test_layout_goldens.py`` tests the other specs of this directory.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.documents.problems import ProblemsFound, errors_of
from distflow.spec.parse import load_spec, load_spec_text

GOLDENS = Path(__file__).parents[2] / "goldens" / "problems"
CASES = sorted(GOLDENS.glob("spec_*.yaml"))
RENEW = "DISTFLOW_RENEW_GOLDENS=1 pytest tests/unit/spec/test_problem_goldens.py"
ONLY_WARNINGS = ("spec_warnings",)


def messages_about(path: Path) -> str:
    """Return all messages about a spec, with paths relative to its directory."""
    try:
        problems = load_spec(str(path))[1]
    except ProblemsFound as error:
        problems = error.problems
    text = "\n".join(problem.as_text() for problem in problems) + "\n"
    return text.replace(f"{path.parent}/", "")


def test_there_are_golden_files() -> None:
    assert len(CASES) >= 44


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_messages_about_an_invalid_spec_match_the_golden_file(path: Path) -> None:
    found = messages_about(path)
    golden = path.with_suffix(".txt")
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found, encoding="utf-8")
    wanted = golden.read_text(encoding="utf-8") if golden.exists() else ""
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), golden.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", f"if this is right: {RENEW}"]), pytrace=False)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_spec_is_refused_unless_it_has_only_warnings(path: Path) -> None:
    if path.stem in ONLY_WARNINGS:
        assert not errors_of(load_spec(str(path))[1])
    else:
        with pytest.raises(ProblemsFound):
            load_spec(str(path))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_message_has_the_words_of_the_schema_validator(path: Path) -> None:
    messages = messages_about(path)
    for phrase in (
        "is not of type",
        "is a required property",
        "does not match",
        "were unexpected",
        "is not valid under",
        "None",
    ):
        assert phrase not in messages


def wrong_values(value: Any) -> Iterator[Any]:
    """Yield copies of a document in which one value has the wrong type or is missing."""
    yield from (None, 5, [5], {}, "x")
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for wrong in wrong_values(one):
            changed = copy.copy(value)
            changed[key] = wrong
            yield changed


@pytest.mark.parametrize("name", ["barrier", "checkpoint", "credentials", "datasets", "files", "labels", "topology", "urls"])
def test_a_wrong_value_anywhere_is_a_problem_or_valid(name: str, tmp_path: Path) -> None:
    path = GOLDENS.parent / "osmo" / f"{name}.yaml"
    for changed in wrong_values(yaml.safe_load(path.read_text())):
        try:
            load_spec_text(json.dumps(changed), path.name, tmp_path)
        except ProblemsFound:
            continue
        except Exception as error:
            raise AssertionError(changed) from error
