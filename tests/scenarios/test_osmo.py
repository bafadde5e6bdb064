"""Run the specs in ``tests/goldens/osmo/*.yaml``, which use all keys of OSMO's language.

The result of each spec must be equal to the text next to it. ``DISTFLOW_RENEW_GOLDENS=1`` writes these texts again; the diff
then shows the changes.
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
CREDENTIALS: Mapping[str, str] = MappingProxyType({"tracker": "api_key=a-key-of-mine", "deploy": "id_key=another-key"})


@pytest.mark.parametrize("name", NAMES)
def test_an_osmo_spec_has_the_result_of_its_golden_file(cli: Cli, name: str) -> None:
    spec = _prepare(cli, name)
    cli.configure(gpus=2)
    text = (cli.folder / "distflow.yaml").read_text()
    node = "{name: local, platform: cpu, memory: 8Gi, labels: {rack: r1, row: a},"
    (cli.folder / "distflow.yaml").write_text(text.replace("{name: local,", node))
    _compare(name, _run(cli, spec, name), GOLDENS / f"{name}.txt")


def test_osmo_specs_have_the_same_results_on_ssh_hosts(lab: Lab) -> None:
    racks = {"gpu1": "r1", "gpu2": "r2", "gpu3": "r2"}
    lab.configure(nodes={node: {"cpus": 1, "labels": {"rack": rack, "row": node}} for node, rack in racks.items()})
    for name in ("gang_strict", "topology", "combination"):  # the last one stores files
        spec = _prepare(lab.cli, name)
        _compare(name, _run(lab.cli, spec, name), GOLDENS / f"{name}.txt")
    assert {task["node_name"] for task in lab.cli.tasks("topology-1").values()} == {"gpu2", "gpu3"}


def test_every_key_of_osmos_language_is_in_one_of_the_specs() -> None:
    used: set[str] = set()
    for name in (*NAMES, "tutorial"):
        text = (GOLDENS / f"{name}.yaml").read_text()
        rendered = render(text, name, sets=[("here", "/tmp")] if "{{here}}" in text else [])
        used |= used_keys(yaml.safe_load(rendered.text))
        # Rendering removes this section.
        used |= {"default-values"} if "\ndefault-values:" in text else set()
    assert sorted(osmo_keys() - used) == []


def _prepare(cli: Cli, name: str) -> Path:
    """Copy the specs, and create the input files, datasets and credentials of one. Return the path of this spec."""
    shutil.copytree(GOLDENS, cli.folder / "osmo", dirs_exist_ok=True)
    for path, content in {"first.txt": "12\n", "second.md": "x\n", "sub/third.txt": "7\n"}.items():
        file = cli.folder / "data" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    if name == "datasets":
        assert cli.run("dataset", "upload", "numbers", "data").code == 0
    if name == "credentials":
        for credential, payload in CREDENTIALS.items():
            assert cli.run("credential", "set", credential, "--payload", payload).code == 0
    return cli.folder / "osmo" / f"{name}.yaml"


def _run(cli: Cli, spec: Path, name: str) -> str:
    """Run a spec to its end, and return its result as text: exit code, warnings, states, logs and stored files."""
    here = ("--set", f"here={cli.folder}") if "{{here}}" in spec.read_text() else ()
    done = cli.run("workflow", "submit", f"osmo/{spec.name}", "--wait", *here, *ARGUMENTS.get(name, ()))
    workflow = cli.query(_workflow_id(cli), "-v")
    lines = [f"exit code {done.code}"]
    lines += [
        line.replace(str(cli.folder), "HERE")
        for line in done.err.splitlines()
        # Omit a warning that appears only if the tests run in /tmp, which the tasks of a node share.
        if ": warning: " in line and f"share `{cli.folder}`" not in line
    ]
    lines += [f"{workflow['name']}: {workflow['status']}"]
    lines += [f"label {key}={value}" for key, value in sorted(workflow["labels"].items())]
    for group in workflow["groups"]:
        lines += ["", f"{group['name']}: {group['status']}"]
        for task in sorted(group["tasks"], key=lambda task: (task["name"], task["retry_id"])):
            code = "" if task["exit_code"] is None else f", exit code {task['exit_code']}"
            lines += [f"  {task['name']} {task['retry_id']}: {task['status']}{code}"]
    # Tasks run at the same time, so only the order of the lines of each task is certain.
    logs = sorted(cli.logs(workflow["name"]).splitlines(), key=lambda line: line.partition("]")[0])
    lines += ["", *logs] if logs else []
    store = cli.folder / "store"
    stored = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    lines += ["", *(f"stored {path}" for path in stored)] if stored else []
    datasets = json.loads(cli.run("dataset", "list", "-t", "json").out)["datasets"]
    lines += ["", *(f"dataset {one['name']}: versions {one['versions']}" for one in datasets)] if datasets else []
    return "".join(f"{line}\n" for line in lines)


def _workflow_id(cli: Cli) -> str:
    """Return the id of the latest workflow."""
    (workflow,) = json.loads(cli.run("workflow", "list", "--count", "1", "-t", "json").out)["workflows"]
    return str(workflow["name"])


def _compare(name: str, text: str, golden: Path) -> None:
    """Compare a result with its golden file, or write the golden file again."""
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text(), name
