"""Each row of docs/reliability.md names a test, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (TESTS / path).exists() or not re.search(rf"^def {name}\(", (TESTS / path).read_text(), re.MULTILINE)
    ]
    assert not missing


def test_every_row_of_the_page_names_a_test() -> None:
    faults = PAGE.read_text().partition("<!-- figures: begin")[0]
    rows = [line for line in faults.splitlines() if line.startswith("| ") and "tested by" not in line]
    assert len(rows) > 25
    bare = [row for row in rows if "::test_" not in row.rpartition(" | ")[2]]
    assert not bare
