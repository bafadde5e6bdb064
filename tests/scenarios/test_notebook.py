"""Run the notebook of the documentation in a real kernel: each cell prints the output that the notebook shows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from scenarios.conftest import Cli
from scenarios.lasting import lasting_supervisor

nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: run `make`")
nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: run `make`")

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "python.ipynb"


@pytest.mark.torch
def test_each_cell_prints_the_output_that_the_notebook_shows(
    cli: Cli, forking_site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISTFLOW_STATE", "HOME"):
        monkeypatch.setenv(name, cli.environment[name])
    cli.configure(environment=f"{{PYTHONPATH: {forking_site}}}")
    expected = nbformat.read(NOTEBOOK, 4)
    executed = nbformat.read(NOTEBOOK, 4)
    project = cli.folder / "project"
    project.mkdir()
    notebook = nbclient.NotebookClient(executed, timeout=120, resources={"metadata": {"path": str(project)}})
    with lasting_supervisor(cli):
        notebook.execute(env=dict(os.environ))
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        for cell in executed.cells:
            cell.get("metadata", {}).pop("execution", None)
        nbformat.write(executed, NOTEBOOK)
    for old, new in zip(expected.cells, executed.cells, strict=True):
        assert _texts(new) == _texts(old), new.source
    table = next(
        output for cell in executed.cells for output in cell.get("outputs", ()) if "text/html" in output.get("data", {})
    )
    assert "<polyline" in table.data["text/html"]


def _texts(cell: Any) -> list[str]:
    """Return the outputs of a cell, without HTML tags and drawings."""
    outputs = [output.get("text") or output.get("data") for output in cell.get("outputs", ())]
    pages = [one if isinstance(one, str) else one.get("text/html", one["text/plain"]) for one in outputs]
    return [re.sub(r"<svg.*</svg>|<[^>]+>", " ", page, flags=re.DOTALL) for page in pages]
