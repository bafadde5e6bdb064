"""Wrong specs and every message about them.

``goldens/problems/spec_*.yaml`` break a rule each (some break many of one kind) and stand beside what distflow says (``.txt``).
The layout's cases have a runner of their own.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound, errors_of
from distflow.spec.parse import load_spec

GOLDENS = Path(__file__).parents[2] / "goldens" / "problems"
CASES = sorted(GOLDENS.glob("spec_*.yaml"))
RENEW = "DISTFLOW_RENEW_GOLDENS=1 pytest tests/unit/spec/test_problem_goldens.py"
ONLY_WARNINGS = ("spec_warnings",)


def findings_of(path: Path) -> str:
    """Return every message about a spec, with its file named as in its own directory."""
    try:
        problems = load_spec(str(path))[1]
    except ProblemsFound as error:
        problems = error.problems
    text = "\n".join(problem.as_text() for problem in problems) + "\n"
    return text.replace(f"{path.parent}/", "")


def test_there_are_cases() -> None:
    assert len(CASES) >= 44


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_wrong_spec_says_what_to_change(path: Path) -> None:
    found = findings_of(path)
    golden = path.with_suffix(".txt")
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found, encoding="utf-8")
    wanted = golden.read_text(encoding="utf-8") if golden.exists() else ""
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), golden.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", f"if this is right: {RENEW}"]), pytrace=False)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_only_errors_stop_a_spec(path: Path) -> None:
    if path.stem in ONLY_WARNINGS:
        assert not errors_of(load_spec(str(path))[1])
    else:
        with pytest.raises(ProblemsFound):
            load_spec(str(path))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_message_is_the_validators_own(path: Path) -> None:
    said = findings_of(path)
    for phrase in (
        "is not of type",
        "is a required property",
        "does not match",
        "were unexpected",
        "is not valid under",
        "None",
    ):
        assert phrase not in said
