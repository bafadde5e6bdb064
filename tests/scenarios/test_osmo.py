"""OSMO's language in specs of our own, ``tests/goldens/osmo/*.yaml``: each runs to its end.

The results are compared with the text next to each spec.

``DISTFLOW_RENEW_GOLDENS=1`` writes the texts again; the diff then shows the changes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from distflow.spec.template import render
from language import osmo_keys, used_keys
from scenarios.conftest import Cli
from scenarios.lab import Lab

GOLDENS = Path(__file__).parent.parent / "goldens" / "osmo"
# tutorial.yaml trains: test_specs.py runs it.
NAMES = sorted(path.stem for path in GOLDENS.glob("*.yaml") if path.stem != "tutorial")
ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "template": ("--set", "suffix=two", "epochs=4", "fast=true", "--set-string", "tag=007"),
        "labels": ("--label", "team=speech"),
        "environment": ("--set-env", "EMPTY=a=b"),
    }
)
KEYS: Mapping[str, str] = MappingProxyType({"tracker": "api_key=a-key-of-mine", "deploy": "id_key=another-key"})


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_of_osmos_language_runs_as_the_golden_text_says(cli: Cli, name: str) -> None:
    spec = _bring(cli, name)
    cli.configure(gpus=2)
    text = (cli.folder / "distflow.yaml").read_text()
    node = "{name: local, platform: cpu, memory: 8Gi, labels: {rack: r1, row: a},"
    (cli.folder / "distflow.yaml").write_text(text.replace("{name: local,", node))
    _hold(name, _run(cli, spec, name), GOLDENS / f"{name}.txt")


@pytest.mark.parametrize("name", ["combination", "gang_strict", "topology"])
def test_it_runs_so_on_nodes_behind_ssh(lab: Lab, name: str) -> None:
    racks = {"gpu1": "r1", "gpu2": "r2", "gpu3": "r2"}
    lab.configure(nodes={node: {"cpus": 1, "labels": {"rack": rack, "row": node}} for node, rack in racks.items()})
    spec = _bring(lab.cli, name)
    _hold(name, _run(lab.cli, spec, name), GOLDENS / f"{name}.txt")
    if name == "topology":
        ident = _ident(lab.cli)
        assert {task["node_name"] for task in lab.cli.tasks(ident).values()} == {"gpu2", "gpu3"}


def test_every_key_of_osmos_language_is_in_one_of_the_specs() -> None:
    used: set[str] = set()
    for name in (*NAMES, "tutorial"):
        text = (GOLDENS / f"{name}.yaml").read_text()
        rendered = render(text, name, sets=[("here", "/tmp")] if "{{here}}" in text else [])
        used |= used_keys(yaml.safe_load(rendered.text))
        # The template has taken it away.
        used |= {"default-values"} if "\ndefault-values:" in text else set()
    assert sorted(osmo_keys() - used) == []


def _bring(cli: Cli, name: str) -> Path:
    """Copy the specs, and put down what they take."""
    shutil.copytree(GOLDENS, cli.folder / "osmo")
    for path, words in {"first.txt": "12\n", "second.md": "x\n", "sub/third.txt": "7\n"}.items():
        file = cli.folder / "data" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(words)
    if name == "datasets":
        assert cli.run("dataset", "upload", "numbers", "data").code == 0
    if name == "credentials":
        for credential, payload in KEYS.items():
            assert cli.run("credential", "set", credential, "--payload", payload).code == 0
    return cli.folder / "osmo" / f"{name}.yaml"


def _run(cli: Cli, spec: Path, name: str) -> str:
    """Run a spec to its end, and return in words what came of it."""
    here = ("--set", f"here={cli.folder}") if "{{here}}" in spec.read_text() else ()
    done = cli.run("workflow", "submit", f"osmo/{spec.name}", "--wait", *here, *ARGUMENTS.get(name, ()))
    workflow = cli.query(_ident(cli), "-v")
    lines = [f"exit code {done.code}"]
    lines += [
        line.replace(str(cli.folder), "HERE")
        for line in done.err.splitlines()
        # Whether the tests' directory lies in /tmp, which tasks of a node share, depends on the machine.
        if ": warning: " in line and f"share `{cli.folder}`" not in line
    ]
    lines += [f"{workflow['name']}: {workflow['status']}"]
    lines += [f"label {key}={value}" for key, value in sorted(workflow["labels"].items())]
    for group in workflow["groups"]:
        lines += ["", f"{group['name']}: {group['status']}"]
        for task in sorted(group["tasks"], key=lambda task: (task["name"], task["retry_id"])):
            code = "" if task["exit_code"] is None else f", exit code {task['exit_code']}"
            lines += [f"  {task['name']} {task['retry_id']}: {task['status']}{code}"]
    # Tasks run side by side: only the order of each one's own lines is certain.
    logs = sorted(cli.logs(workflow["name"]).splitlines(), key=lambda line: line.partition("]")[0])
    lines += ["", *logs] if logs else []
    store = cli.folder / "store"
    stored = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    lines += ["", *(f"stored {path}" for path in stored)] if stored else []
    datasets = json.loads(cli.run("dataset", "list", "-t", "json").out)["datasets"]
    lines += ["", *(f"dataset {one['name']}: versions {one['versions']}" for one in datasets)] if datasets else []
    return "".join(f"{line}\n" for line in lines)


def _ident(cli: Cli) -> str:
    (workflow,) = json.loads(cli.run("workflow", "list", "-t", "json").out)["workflows"]
    return str(workflow["name"])


def _hold(name: str, text: str, golden: Path) -> None:
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text(), name
