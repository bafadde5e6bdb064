"""The notebook of the documentation, run by a real kernel: each cell gives what the page shows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from scenarios.conftest import Cli

nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: run `make`")
nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: run `make`")

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "python.ipynb"


@pytest.mark.torch
def test_the_notebook_gives_what_it_shows(cli: Cli, forking_site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTFLOW_STATE", "HOME"):
        monkeypatch.setenv(name, cli.environment[name])
    cli.configure(environment=f"{{PYTHONPATH: {forking_site}}}")
    shown = nbformat.read(NOTEBOOK, 4)
    again = nbformat.read(NOTEBOOK, 4)
    project = cli.folder / "project"
    project.mkdir()
    nbclient.NotebookClient(again, timeout=120, resources={"metadata": {"path": str(project)}}).execute(env=dict(os.environ))
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        for cell in again.cells:
            cell.get("metadata", {}).pop("execution", None)
        nbformat.write(again, NOTEBOOK)
    for old, new in zip(shown.cells, again.cells, strict=True):
        assert _texts(new) == _texts(old), new.source
    table = next(output for cell in again.cells for output in cell.get("outputs", ()) if "text/html" in output.get("data", {}))
    assert "<polyline" in table.data["text/html"]


def _texts(cell: Any) -> list[str]:
    """Return the output of a cell, with pages reduced to their words."""
    outputs = [output.get("text") or output.get("data") for output in cell.get("outputs", ())]
    pages = [one if isinstance(one, str) else one.get("text/html", one["text/plain"]) for one in outputs]
    return [re.sub(r"<svg.*</svg>|<[^>]+>", " ", page, flags=re.DOTALL) for page in pages]
