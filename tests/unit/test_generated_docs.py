"""The generated parts of docs/ equal the output of ``make docs``, and the tables that they are made from are complete."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from distflow.documents.schema import load_schema
from distflow.lifecycle.states import TRANSITIONS, Reason, State

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GENERATED = {
    "diagnosis.md": ["diagnoses", "findings"],
    "configuration.md": ["configuration"],
    "exit-codes.md": ["exit-codes", "error-tree"],
    "rank-layout.md": ["layout-rules"],
    "spec.md": ["spec"],
    "retries.md": ["task-exit-codes"],
    "states.md": ["states", "workflow-states", "reasons", "statuses"],
}


def _load(path: Path) -> ModuleType:
    description = importlib.util.spec_from_file_location(path.stem, path)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    # `dataclass` looks up the module of a class in `sys.modules`.
    sys.modules[path.stem] = module
    description.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The module ``scripts/generate_docs.py``."""
    return _load(ROOT / "scripts" / "generate_docs.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_equals_the_output_of_make_docs(page: Path, generator: ModuleType) -> None:
    before = page.read_text(encoding="utf-8")
    after: str = generator.renewed(before)
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), page.name, "now", lineterm="", n=1))
    if lines:
        pytest.fail("\n".join([*lines[:60], "", "to update it: make docs"]), pytrace=False)


def test_every_generated_part_is_on_its_page(generator: ModuleType) -> None:
    found = {page.name: parts for page in PAGES if (parts := generator.parts_of(page.read_text(encoding="utf-8")))}
    assert found == GENERATED
    assert sorted(part for parts in found.values() for part in parts) == sorted(generator.PARTS)


def test_a_changed_generated_part_is_written_again(generator: ModuleType) -> None:
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    changed = page.replace("another program canceled it", "another program stopped it", 1)
    assert changed != page
    assert generator.renewed(changed) == page


def test_every_key_of_the_spec_is_in_its_reference(generator: ModuleType) -> None:
    schema = load_schema("distflow.spec", "workflow.schema.json")
    keys = {key for rule in (schema, *schema["$defs"].values()) for key in rule.get("properties", {})}
    text: str = generator.spec_reference()
    assert len(keys) > 40
    missing = [key for key in keys if not re.search(rf"^\| `{re.escape(key)}`", text, re.MULTILINE)]
    assert not missing


def test_every_error_is_in_the_tree_with_its_exit_code(generator: ModuleType) -> None:
    tree: str = generator.error_tree()
    for error in generator.FAMILY:
        if error.__name__ != "DistflowError":
            assert re.search(rf"─ {error.__name__} +{error.exit_code} ", tree), error.__name__


def test_every_state_and_reason_is_in_its_table(generator: ModuleType) -> None:
    states, reasons = generator.state_table(), generator.reason_table()
    assert all(f"| `{state.value}` |" in states for state in State)
    assert all(f"| `{reason.value}` |" in reasons for reason in Reason)


def test_the_drawing_of_a_gang_shows_all_states_and_only_legal_moves() -> None:
    drawing = (ROOT / "docs" / "gang.svg").read_text(encoding="utf-8")
    boxes = set(re.findall(r">([A-Z]+)</text>", drawing))
    assert boxes == {state.value for state in State} - {"RESCHEDULED"}  # a state of attempts, not of gangs
    moves = {(State(before), State(after)) for before, after in re.findall(r'id="([A-Z]+)-([A-Z]+)"', drawing)}
    assert len(moves) == drawing.count(" id=") - drawing.count("<marker")
    assert all(after in TRANSITIONS[before] for before, after in moves)
    assert {state for move in moves for state in move} == {State(name) for name in boxes}


def test_anchors_of_headings_are_those_of_github(generator: ModuleType) -> None:
    assert generator.slug("An entry of `workflow.resources`") == "an-entry-of-workflowresources"
    assert generator.slug("What survives what?") == "what-survives-what"
    assert generator.slug("torchrun: node ranks are 0 … nnodes − 1") == "torchrun-node-ranks-are-0--nnodes--1"
