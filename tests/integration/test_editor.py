"""The schemas in editors: a real yaml-language-server checks and completes specs and configurations."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(sys.prefix) / "yaml-language-server/node_modules/yaml-language-server/out/server/src/server.js"
SETTINGS = {"validate": True, "completion": True, "schemaStore": {"enable": False}}

pytestmark = pytest.mark.skipif(
    not SERVER.exists() or shutil.which("node") is None, reason="run sh scripts/install_yaml_server.sh .venv"
)


class Editor:
    """A client of yaml-language-server, like an editor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(["node", SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._findings: dict[str, list[dict[str, Any]]] = {}
        self._requests = self._documents = 0
        self._request("initialize", processId=None, rootUri=folder.as_uri(), capabilities={})
        self._notify("initialized")
        self._notify("workspace/didChangeConfiguration", settings={"yaml": SETTINGS})

    def close(self) -> None:
        """End the server."""
        with self._process:
            self._process.kill()

    def findings(self, text: str) -> list[tuple[int, str]]:
        """Return the line and the message of each finding of a document."""
        return [(found["range"]["start"]["line"] + 1, found["message"]) for found in self._findings[self._open(text)]]

    def proposals(self, text: str) -> set[str]:
        """Return what the editor proposes at the character `|` of a document."""
        uri = self._open(text.replace("|", ""))
        before = text.partition("|")[0].split("\n")
        position = {"line": len(before) - 1, "character": len(before[-1])}
        result = self._request("textDocument/completion", textDocument={"uri": uri}, position=position)
        return {item["label"] for item in result["items"]}

    def _open(self, text: str) -> str:
        self._documents += 1
        uri = (self.folder / f"document-{self._documents}.yaml").as_uri()
        self._notify("textDocument/didOpen", textDocument={"uri": uri, "languageId": "yaml", "version": 1, "text": text})
        while uri not in self._findings:
            self._read()
        return uri

    def _request(self, method: str, **params: Any) -> Any:
        self._requests += 1
        self._send({"id": self._requests, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == self._requests and "method" not in message:
                return message["result"]

    def _notify(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        output, size = self._process.stdout, 0
        assert output is not None
        while line := output.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        assert size, "the language server has ended"
        message: dict[str, Any] = json.loads(output.read(size))
        if message.get("method") == "textDocument/publishDiagnostics":
            self._findings[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif "id" in message and "method" in message:
            items = message.get("params", {}).get("items", [])
            result = [SETTINGS if item.get("section") == "yaml" else None for item in items]
            self._send({"id": message["id"], "result": result})
        return message


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("project")
    for option in ("--config", None):
        command = [sys.executable, "-m", "distflow", "schema", *([option] if option else [])]
        name = "config.schema.json" if option else "workflow.schema.json"
        (folder / name).write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    editor = Editor(folder)
    try:
        yield editor
    finally:
        editor.close()


SPEC = "# yaml-language-server: $schema=workflow.schema.json\n"
CONFIGURATION = "# yaml-language-server: $schema=config.schema.json\n"


def test_samples_have_no_findings(editor: Editor) -> None:
    samples = [one for one in (resources.files("distflow") / "samples").iterdir() if one.name.endswith(".yaml")]
    assert samples
    found = {one.name: editor.findings(one.read_text(encoding="utf-8")) for one in samples}
    assert not {name: findings for name, findings in found.items() if findings}


CORRECT = """\
workflow:
  name: train
  resources:
    default: {gpu: 1, memory: 8Gi}
  groups:
  - name: training
    launcher: torchrun
    tasks:
    - name: master
      lead: true
      replicas: {{workers}}
      ranks: {size: {{size}}}
      command: [python3, train.py]
      environment: {EPOCHS: {{epochs}}}
      files:
      - {path: train.py, localpath: train.py}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("gpu: 1", "gpu: many", 5, "String does not match the pattern"),
        ("gpu: 1", "gpu: {count: 1}", 5, "Incorrect type"),
        ("memory: 8Gi", "memory: 8 gigabytes", 5, "String does not match the pattern"),
        ("launcher: torchrun", "launcher: torchrn", 8, "String does not match the pattern"),
        ("launcher: torchrun", "framework: pytorh", 8, "Value is not accepted. Valid values"),
        ("lead: true", "lead: maybe", 11, "String does not match the pattern"),
        ("replicas: {{workers}}", "replicas: 0", 12, "Value is below the minimum of 1"),
        ("command: [python3, train.py]", "comand: [python3, train.py]", 14, "Property comand is not allowed"),
        ("command: [python3, train.py]", "args: []", 10, 'Missing property "command"'),
        ("name: train\n", "name: 2train\n", 3, "String does not match the pattern"),
        (", localpath: train.py", "", 17, 'Missing property "contents"'),
        ("name: training\n", "title: training\n", 7, 'Missing property "name"'),
    ],
)
def test_mistakes_in_specs_are_marked(editor: Editor, right: str, wrong: str, line: int, message: str) -> None:
    assert editor.findings(SPEC + CORRECT) == []
    assert CORRECT.count(right) == 1
    found = editor.findings(SPEC + CORRECT.replace(right, wrong))
    assert any(where == line and message in text for where, text in found), found


GROUP = "workflow:\n  name: train\n  groups:\n  - name: training\n    "


@pytest.mark.parametrize(
    ("text", "proposals"),
    [
        (GROUP + "launcher: |", {"torchrun", "spawn", "command"}),
        (GROUP + "launcher: {kind: |}", {"torchrun", "spawn", "command"}),
        (
            GROUP + "framework: |",
            {"pytorch", "deepspeed", "accelerate", "horovod", "mpi", "tensorflow", "jax", "ray", "custom"},
        ),
        (GROUP + "strategy:\n      kind: |", {"none", "ddp", "fsdp", "tp", "hybrid", "pipeline"}),
        (GROUP + "barrier: |", {"true", "false"}),
        (GROUP + "|", {"tasks", "launcher", "elastic", "strategy"}),
        (GROUP + "tasks:\n    - name: a\n      exitActions:\n        |", {"COMPLETE", "FAIL", "RESCHEDULE"}),
        ("workflow:\n  resources:\n    default:\n      topology:\n      - requirementType: |", {"required", "preferred"}),
    ],
)
def test_values_of_specs_are_proposed(editor: Editor, text: str, proposals: set[str]) -> None:
    assert proposals <= editor.proposals(SPEC + text)


def test_configurations_are_checked_and_completed(editor: Editor) -> None:
    pool = CONFIGURATION + "pools:\n  lab:\n    "
    assert editor.findings(pool + "backend: ssh\n    nodes: [gpu1, {name: gpu2, gpus: 8}]\n") == []
    assert editor.findings(pool + "backend: telnet\n")[0][0] == 4
    assert {"local", "ssh"} <= editor.proposals(pool + "backend: |")
    assert {"docker", "podman", "apptainer"} <= editor.proposals(pool + "container: |")
    assert {"strict", "accept-new"} <= editor.proposals(pool + "host_key_policy: |")
