"""Outputs that go from their nodes to a store: nothing of them passes here, unless a node cannot; faults meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.testing.s3 import S3Server
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

LARGE = 3_000_000
GANG = """
workflow:
  name: direct
  groups:
  - name: g
    tasks:
    - name: one
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'mkdir {{output}}/m; head -c 3000000 /dev/urandom > {{output}}/m/one.pt; echo x > {{output}}/log']
      outputs: [{url: "s3://b/runs/{{workflow_id}}", regex: 'm/'}]
    - name: two
      ranks: {size: 1}
      command: [sh, -c, 'echo 2 > {{output}}/two.pt']
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


def _bare_python(folder: Path) -> str:
    """Return a python that has nothing but itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "bare")], check=True)
    return str(folder / "bare" / "bin" / "python")


def _packed(cli: Cli) -> list[Path]:
    """Outputs that a node has packed: without that, nothing of them can leave it but to a store."""
    return list(cli.folder.rglob("packed.json"))


def _deliverers(cli: Cli) -> list[int]:
    return [pid for pid, _ in cli.processes() if _name(pid) == "df-deliver"]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _events(cli: Cli, ident: str) -> str:
    return cli.run("workflow", "events", ident).out


@pytest.mark.parametrize("where", ["local", pytest.param("lab", marks=pytest.mark.ssh)])
def test_nothing_passes_through_this_machine(where: str, cli: Cli, s3: S3Server, request: pytest.FixtureRequest) -> None:
    bucket = s3.bucket("b")
    if where == "lab":
        request.getfixturevalue("lab")
    done = cli.run("workflow", "submit", cli.spec(GANG), "--wait")
    assert done.code == 0, done.err
    assert {str(path.relative_to(bucket)): path.stat().st_size for path in bucket.rglob("*") if path.is_file()} == {
        "runs/direct-1/m/one.pt": LARGE, "runs/direct-1/two.pt": 2,
    }  # fmt: skip
    events = _events(cli, "direct-1")
    assert "[one] its output is at s3://b/runs/direct-1: 1 file, 2.9 MiB" in events
    assert "[two] its output is at s3://b/runs/direct-1: 1 file, 2 B" in events
    assert "its output is here" not in events
    assert "through this machine" not in events
    assert _packed(cli) == []


@pytest.mark.parametrize("where", ["local", pytest.param("lab", marks=pytest.mark.ssh)])
def test_a_node_without_a_driver_is_relayed_and_told_how_it_would_not_be(
    where: str, cli: Cli, s3: S3Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket, python = s3.bucket("b"), _bare_python(tmp_path)
    if where == "lab":
        lab: Lab = request.getfixturevalue("lab")
        lab.configure(names=("gpu1", "gpu2"), nodes={"gpu2": {"python": python}})
    else:
        cli.configure(python=python)
    done = cli.run("workflow", "submit", cli.spec(GANG), "--wait")
    assert done.code == 0, done.err
    assert (bucket / "runs" / "direct-1" / "m" / "one.pt").stat().st_size == LARGE
    events = _events(cli, "direct-1")
    for name, task in cli.tasks("direct-1").items():
        is_bare = task["node_name"] in ("gpu2", "local")
        words = f"[{name}] its output goes to s3://b/runs/direct-1 through this machine: {task['node_name']}: {python} has no"
        assert events.count(words) == is_bare, events
        assert (f"[{name}] its output is here" in events) == is_bare
        assert f"[{name}] its output is at s3://b/runs/direct-1: 1 file" in events
    assert f"has no s3fs (to make it direct: {python} -m pip install s3fs)" in events


def test_what_is_here_stays_here_and_credentials_of_files_are_not_sent(cli: Cli, s3: S3Server, tmp_path: Path) -> None:
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
    assert "[only] its output goes to s3://b/x through this machine: no node has the credentials" in events


def test_what_the_store_refuses_a_node_it_may_allow_us(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    cli.environment["AWS_SECRET_ACCESS_KEY"] = "wrong-4711"
    ident = cli.submit(cli.spec(ONE.replace("URL", "s3://b/x")))
    body = cli.await_status(ident, "FAILED")
    assert (body["reason"], body["groups"][0]["reason"]) == ("DATA", "DATA")
    assert "only: its output cannot be written: s3://b/x: refused: " in body["groups"][0]["message"]
    assert "through this machine: local: s3://b/x: refused: " in _events(cli, ident)
    wait_until(lambda: cli.supervisor() is None, 30)
    found = subprocess.run(["grep", "-rl", "wrong-4711", str(cli.folder)], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_an_output_that_cannot_be_handed_on_is_named_at_once(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    spec = ONE.replace("URL", "s3://b/x").replace("head -c 3000000 /dev/urandom > {{output}}/a.pt", "ln -s /etc {{output}}/up")
    ident = cli.submit(cli.spec(spec))
    body = cli.await_status(ident, "FAILED")
    assert body["reason"] == "DATA"
    assert "the link up in its output leads to /etc, outside of it" in body["groups"][0]["message"]
    assert "through this machine" not in _events(cli, ident)


def _begin(cli: Cli, s3: S3Server) -> tuple[str, int]:
    """Return a workflow of which the output is on its way to a store that does not move, and the process that brings it."""
    s3.bucket("b")
    s3.freeze()
    ident = cli.submit(cli.spec(ONE.replace("URL", "s3://b/x")))
    wait_until(lambda: len(_deliverers(cli)) == 1, 60)
    return ident, _deliverers(cli)[0]


def _all_is_there(cli: Cli, s3: S3Server, ident: str) -> None:
    cli.await_status(ident, "COMPLETED")
    assert (s3.data / "b" / "x" / "a.pt").stat().st_size == LARGE
    events = _events(cli, ident)
    assert events.count("its output is at s3://b/x: 1 file") == 1
    assert "through this machine" not in events
    assert _packed(cli) == []


def test_a_transfer_that_is_cut_is_asked_for_again(cli: Cli, s3: S3Server) -> None:
    ident, pid = _begin(cli, s3)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: set(_deliverers(cli)) - {pid}, 60)
    s3.thaw()
    _all_is_there(cli, s3, ident)


@pytest.mark.ssh
def test_a_node_whose_link_is_cut_goes_on_when_it_is_back(lab: Lab, s3: S3Server) -> None:
    cli = lab.cli
    lab.configure(names=("gpu1",), connect_timeout="2s")
    ident, pid = _begin(cli, s3)
    lab.servers["gpu1"].stop()
    # It ends with its connection; and that one is away for longer than any number of tries.
    wait_until(lambda: pid not in _deliverers(cli), 60)
    lab.await_message(ident, "their outputs are written: s3://b/x; gpu1 is out of reach: ")
    lab.servers["gpu1"].start()
    s3.thaw()
    _all_is_there(cli, s3, ident)


@pytest.mark.ssh
def test_a_node_that_does_not_come_back_spoils_its_output(lab: Lab, s3: S3Server) -> None:
    lab.configure(names=("gpu1",), connect_timeout="2s", node_lost_after="2s")
    ident, _ = _begin(lab.cli, s3)
    lab.servers["gpu1"].stop()
    body = lab.cli.await_status(ident, "FAILED_BACKEND_ERROR")
    assert body["groups"][0]["reason"] == "NODE_LOST"
    assert "only: its output cannot be handed on: gpu1 has been out of reach for" in body["groups"][0]["message"]
    s3.thaw()


def test_a_supervisor_that_is_killed_leaves_nothing_running_and_the_next_goes_on(cli: Cli, s3: S3Server) -> None:
    ident, pid = _begin(cli, s3)
    supervisor = cli.supervisor()
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: pid not in _deliverers(cli), 30)
    s3.thaw()
    _all_is_there(cli, s3, ident)


def test_a_cancel_does_not_wait_for_it(cli: Cli, s3: S3Server) -> None:
    ident, pid = _begin(cli, s3)
    assert cli.run("workflow", "cancel", ident, "--wait", "30").code == 0
    assert cli.query(ident)["status"] == "FAILED_CANCELED"
    wait_until(lambda: pid not in _deliverers(cli), 30)
    s3.thaw()
