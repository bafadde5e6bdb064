"""Direct transfers between nodes and stores. Data passes through this machine only if a node cannot transfer it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distflow.testing.s3 import S3Server
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

LARGE = 3_000_000
DIRECT = """
workflow:
  name: direct
  groups:
  - name: g
    tasks:
    - name: one
      lead: true
      ranks: {size: 1}
      inputs: [{url: "s3://b/in", regex: 'm/'}, {dataset: {name: words}}]
      command:
      - sh
      - -c
      - |
        wc -c < {{input:0}}/m/a.pt; cat {{input:1}}/words/w
        mkdir {{output}}/m; head -c 3000000 /dev/urandom > {{output}}/m/one.pt; echo x > {{output}}/log
      outputs: [{url: "s3://b/runs/{{workflow_id}}", regex: 'm/'}]
    - name: two
      ranks: {size: 1}
      inputs: [{url: "s3://b/in"}]
      command: [sh, -c, 'ls {{input:0}}; echo 2 > {{output}}/two.pt']
      outputs: [{url: "s3://b/runs/{{workflow_id}}"}]
"""
ONE = """
workflow:
  name: one
  tasks:
  - name: only
    command: [sh, -c, 'head -c 3000000 /dev/urandom > {{output}}/a.pt']
    outputs: [{url: "URL"}]
"""

HOLD = """
workflow:
  name: hold
  resources: {default: {cpu: 64}}
  tasks:
  - name: holds
    command: [sh, -c, 'while ! test -e GO; do sleep 0.2; done']
"""
TAKES = """
workflow:
  name: takes
  groups:
  - name: g
    tasks:
    - name: one
      lead: true
      ranks: {size: 1}
      inputs: [{url: "s3://b/in", regex: 'm/'}]
      command: [sh, -c, 'wc -c < {{input:0}}/m/a.pt']
    - name: two
      ranks: {size: 1}
      inputs: [{url: "s3://b/in"}]
      command: [sh, -c, 'ls {{input:0}}']
"""


def _bare_python(folder: Path) -> str:
    """Return a Python without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "bare")], check=True)
    return str(folder / "bare" / "bin" / "python")


def _packed(cli: Cli) -> list[Path]:
    """Return the outputs that a node has packed, as it does before it sends them to this machine."""
    return list(cli.folder.rglob("packed.json"))


def _transfer_pids(cli: Cli) -> list[int]:
    """Return the pids of the processes that transfer data on nodes."""
    return [pid for pid, _ in cli.processes() if _process_name(pid) == "df-data"]


def _process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _events(cli: Cli, ident: str) -> str:
    return cli.run("workflow", "events", ident).out


def _write_inputs(cli: Cli, s3: S3Server, size: int = LARGE, *, dataset: bool = False) -> None:
    """Write a large and a small file below ``s3://b/in``, and upload a dataset if it is needed."""
    bucket = s3.bucket("b")
    (bucket / "in" / "m").mkdir(parents=True)
    (bucket / "in" / "m" / "a.pt").write_bytes(os.urandom(size))
    (bucket / "in" / "log").write_bytes(b"x")
    if dataset:
        config = Path(cli.environment["DISTFLOW_CONFIG"])
        config.write_text(json.dumps({**yaml.safe_load(config.read_text()), "datasets": "s3://b/sets"}))
        (cli.folder / "w").write_text("hello\n")
        assert cli.run("dataset", "upload", "words", str(cli.folder / "w")).code == 0


def _run_direct(cli: Cli, s3: S3Server) -> str:
    """Run ``DIRECT``, check its inputs and outputs, and return its events."""
    _write_inputs(cli, s3, dataset=True)
    done = cli.run("workflow", "submit", cli.spec(DIRECT), "--wait")
    assert done.code == 0, done.err
    assert {f"[one] {LARGE}", "[one] hello", "[two] log", "[two] m"} == set(cli.logs("direct-1").splitlines())
    written = s3.data / "b" / "runs"
    assert {str(path.relative_to(written)): path.stat().st_size for path in written.rglob("*") if path.is_file()} == {
        "direct-1/m/one.pt": LARGE, "direct-1/two.pt": 2,
    }  # fmt: skip
    return _events(cli, "direct-1")


@pytest.mark.parametrize("where", ["local", pytest.param("lab", marks=pytest.mark.ssh)])
def test_nodes_transfer_inputs_and_outputs_directly(where: str, cli: Cli, s3: S3Server, request: pytest.FixtureRequest) -> None:
    if where == "lab":
        request.getfixturevalue("lab")
    events = _run_direct(cli, s3)
    assert "[one] its input is fetched by its node: s3://b/in: 1 file, 2.9 MiB" in events
    assert "[one] its input is fetched by its node: dataset words:1: 1 file, 6 B" in events
    assert "[two] its input is fetched by its node: s3://b/in: 2 files, 2.9 MiB" in events
    assert "[one] its output is at s3://b/runs/direct-1: 1 file, 2.9 MiB" in events
    assert "[two] its output is at s3://b/runs/direct-1: 1 file, 2 B" in events
    assert "its output was copied to this machine" not in events
    assert "through this machine" not in events
    assert _packed(cli) == []


@pytest.mark.parametrize("where", ["local", pytest.param("lab", marks=pytest.mark.ssh)])
def test_inputs_and_outputs_of_a_node_without_s3fs_are_relayed_and_the_remedy_is_shown(
    where: str, cli: Cli, s3: S3Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = _bare_python(tmp_path)
    if where == "lab":
        lab: Lab = request.getfixturevalue("lab")
        lab.configure(names=("gpu1", "gpu2"), nodes={"gpu2": {"python": python}})
    else:
        cli.configure(python=python)
    events = _run_direct(cli, s3)
    nodes = {name: task["node_name"] for name, task in cli.tasks("direct-1").items()}
    for name, node in nodes.items():
        is_bare = node in ("gpu2", "local")
        words = f"[{name}] its output goes to s3://b/runs/direct-1 through this machine: {node}: {python} has no"
        assert events.count(words) == is_bare, events
        assert (f"[{name}] its output was copied to this machine" in events) == is_bare
        assert f"[{name}] its output is at s3://b/runs/direct-1: 1 file" in events
    (bare,) = {node for node in nodes.values() if node in ("gpu2", "local")}
    remedy = f"{bare}: {python} has no s3fs (for direct transfers: {python} -m pip install s3fs)"
    assert f"its output goes to s3://b/runs/direct-1 through this machine: {remedy}" in events
    assert f"its input comes from s3://b/in through this machine: {remedy}" in events


def test_uploads_with_credentials_in_files_are_relayed(cli: Cli, s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.bucket("b")
    config = tmp_path / "aws"
    config.write_text(
        f"[default]\naws_access_key_id = {s3.access_key_id}\naws_secret_access_key = {s3.access_key}\n"
        f"region = us-east-1\nendpoint_url = {s3.url}\n"
    )
    for name in s3.environment:
        cli.environment.pop(name, None)
    cli.environment |= {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    outputs = f'{{url: "s3://b/x"}}, {{url: "file://{tmp_path}/out"}}'
    done = cli.run("workflow", "submit", cli.spec(ONE.replace('{url: "URL"}', outputs)), "--wait")
    assert done.code == 0, done.err
    assert (bucket / "x" / "a.pt").read_bytes() == (tmp_path / "out" / "a.pt").read_bytes()
    events = _events(cli, "one-1")
    assert events.count("through this machine") == 1
    assert (
        "[only] its output goes to s3://b/x through this machine: this machine has no credentials that distflow may" in events
    )


def test_an_upload_that_the_store_refuses_is_tried_again_through_this_machine_and_fails(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    cli.environment["AWS_SECRET_ACCESS_KEY"] = "wrong-4711"
    ident = cli.submit(cli.spec(ONE.replace("URL", "s3://b/x")))
    body = cli.await_status(ident, "FAILED")
    assert (body["reason"], body["groups"][0]["reason"]) == ("DATA", "DATA")
    assert "only: its output cannot be written: s3://b/x: the store refused access: " in body["groups"][0]["message"]
    assert "through this machine: local: s3://b/x: the store refused access: " in _events(cli, ident)
    wait_until(lambda: cli.supervisor() is None, 30)
    found = subprocess.run(["grep", "-rl", "wrong-4711", str(cli.folder)], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_an_output_with_a_link_to_another_directory_fails_without_a_relay(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    spec = ONE.replace("URL", "s3://b/x").replace("head -c 3000000 /dev/urandom > {{output}}/a.pt", "ln -s /etc {{output}}/up")
    ident = cli.submit(cli.spec(spec))
    body = cli.await_status(ident, "FAILED")
    assert body["reason"] == "DATA"
    assert "the link `up` in the task's output points to `/etc`" in body["groups"][0]["message"]
    assert "through this machine" not in _events(cli, ident)


def _start_upload(cli: Cli, s3: S3Server) -> tuple[str, int]:
    """Start the upload of an output to a suspended store. Return the workflow and the pid of the transfer process."""
    s3.bucket("b")
    s3.freeze()
    ident = cli.submit(cli.spec(ONE.replace("URL", "s3://b/x")))
    wait_until(lambda: len(_transfer_pids(cli)) == 1, 60)
    return ident, _transfer_pids(cli)[0]


def _await_upload(cli: Cli, s3: S3Server, ident: str) -> None:
    """Wait until the workflow completes, and check that its output was uploaded once and directly."""
    cli.await_status(ident, "COMPLETED")
    assert (s3.data / "b" / "x" / "a.pt").stat().st_size == LARGE
    events = _events(cli, ident)
    assert events.count("its output is at s3://b/x: 1 file") == 1
    assert "through this machine" not in events
    assert _packed(cli) == []


def test_a_killed_upload_is_started_again_and_the_next_supervisor_continues_it(cli: Cli, s3: S3Server) -> None:
    ident, pid = _start_upload(cli, s3)
    os.kill(pid, signal.SIGKILL)
    again = wait_until(lambda: set(_transfer_pids(cli)) - {pid}, 60)
    cli.kill_supervisor()
    wait_until(lambda: not again & set(_transfer_pids(cli)), 30)
    s3.thaw()
    _await_upload(cli, s3, ident)


@pytest.mark.ssh
def test_an_upload_continues_when_its_node_is_reachable_again(lab: Lab, s3: S3Server) -> None:
    cli = lab.cli
    lab.configure(names=("gpu1",), connect_timeout="2s")
    ident, pid = _start_upload(cli, s3)
    lab.servers["gpu1"].stop()
    # The process ends with its connection, which is then missing for longer than all retries take.
    wait_until(lambda: pid not in _transfer_pids(cli), 60)
    lab.await_message(ident, "writing outputs: s3://b/x; gpu1 is unreachable: ")
    lab.servers["gpu1"].start()
    s3.thaw()
    _await_upload(cli, s3, ident)


@pytest.mark.ssh
def test_a_node_that_is_lost_during_an_upload_fails_the_group(lab: Lab, s3: S3Server) -> None:
    lab.configure(names=("gpu1",), connect_timeout="2s", node_lost_after="2s")
    ident, _ = _start_upload(lab.cli, s3)
    lab.servers["gpu1"].stop()
    body = lab.cli.await_status(ident, "FAILED_BACKEND_ERROR")
    assert body["groups"][0]["reason"] == "NODE_LOST"
    assert "only: its output cannot be passed on: gpu1 has been unreachable for" in body["groups"][0]["message"]
    s3.thaw()


def test_a_cancel_does_not_wait_for_an_upload(cli: Cli, s3: S3Server) -> None:
    ident, pid = _start_upload(cli, s3)
    assert cli.run("workflow", "cancel", ident, "--wait", "30").code == 0
    assert cli.query(ident)["status"] == "FAILED_CANCELED"
    wait_until(lambda: pid not in _transfer_pids(cli), 30)
    s3.thaw()


def test_a_node_without_disk_space_for_an_input_is_reported(cli: Cli, s3: S3Server) -> None:
    _write_inputs(cli, s3, 5 * LARGE)
    cli.top.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={4 * LARGE}", "tmpfs", str(cli.top)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        ident = cli.submit(cli.spec(TAKES))
        body = cli.await_status(ident, "FAILED")
        assert (body["reason"], body["groups"][0]["reason"]) == ("DATA", "DATA")
        assert "No space left on device" in body["groups"][0]["message"]
        wait_until(lambda: cli.supervisor() is None, 30)
    finally:
        subprocess.run(["umount", "-l", str(cli.top)], check=True)


def test_a_killed_fetch_is_started_again_and_a_cancel_ends_it(cli: Cli, s3: S3Server) -> None:
    _write_inputs(cli, s3)
    go = cli.folder / "GO"
    holding = cli.submit(cli.spec(HOLD.replace("GO", str(go)), "hold.yaml"))
    ident = cli.submit(cli.spec(TAKES.replace("  groups:", "  resources: {default: {cpu: 32}}\n  groups:")))
    # The input is listed before the store is suspended, and fetched afterwards.
    wait_until(lambda: _events(cli, ident).count("is fetched by its node") == 2, 60)
    s3.freeze()
    go.touch()
    cli.await_status(holding, "COMPLETED")
    wait_until(lambda: len(_transfer_pids(cli)) == 2, 60)
    first = set(_transfer_pids(cli))
    os.kill(min(first), signal.SIGKILL)
    wait_until(lambda: len(set(_transfer_pids(cli)) - first) == 1, 60)
    assert cli.run("workflow", "cancel", ident, "--wait", "60").code == 0
    wait_until(lambda: not _transfer_pids(cli), 30)
    s3.thaw()
