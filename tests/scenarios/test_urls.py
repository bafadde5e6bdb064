"""Inputs and outputs at URLs: real gangs, and an S3 server that checks signatures."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from distflow.testing.s3 import S3Server
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

ROUND = """
workflow:
  name: round
  groups:
  - name: gang
    ignoreNonleadStatus: false
    tasks:
    - name: one
      lead: true
      command:
      - sh
      - -c
      - |
        cat "{{input:0}}/sub/b.pt" "{{input:1}}/a.txt" > "{{output}}/both.txt"
        mkdir "{{output}}/logs"; echo l > "{{output}}/logs/l"
      inputs:
      - url: s3://b/data
        regex: .*\\.pt$
      - url: s3://b/data/a.txt
      outputs:
      - url: s3://b/runs/{{workflow_id}}/
      - url: s3://b/logs
        regex: logs/
    - name: two
      command: [sh, -c, 'ls -A "{{input:0}}"; touch "{{input:0}}/mine"']
      inputs:
      - url: s3://b/data
        regex: .*\\.pt$
  - name: after
    tasks:
    - name: three
      lead: true
      command: [sh, -c, 'cat "{{input:one}}/both.txt" "{{input:1}}/both.txt"']
      inputs:
      - task: one
      - url: s3://b/runs/{{workflow_id}}
"""


def _fill(bucket: Path) -> None:
    (bucket / "data" / "sub").mkdir(parents=True)
    (bucket / "data" / "a.txt").write_text("A\n")
    (bucket / "data" / "sub" / "b.pt").write_text("B\n")


def _message(cli: Cli, ident: str) -> str:
    return str(cli.query(ident)["groups"][0]["message"])


def test_inputs_are_fetched_and_outputs_written(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _fill(bucket)
    done = cli.run("workflow", "submit", cli.spec(ROUND), "--wait")
    assert done.code == 0, done.err
    assert "[two] sub\n" in done.out
    assert done.out.count("[three] B\n[three] A\n") == 2
    assert {str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()} == {
        "data/a.txt", "data/sub/b.pt", "runs/round-1/both.txt", "runs/round-1/logs/l", "logs/logs/l",
    }  # fmt: skip
    events = cli.run("workflow", "events", "round-1").out
    assert "[one] its input is fetched by its node: s3://b/data: 1 file, 2 B" in events
    assert "[one] its output is at s3://b/runs/round-1/: 2 files, 6 B" in events
    assert events.index("its output is at s3://b/logs") < events.index("gang: COMPLETED")
    shown = cli.run("workflow", "query", "round-1").out
    assert "Outputs were written to:\n  one  s3://b/" in shown
    # No data was copied through this machine.
    wait_until(lambda: cli.supervisor() is None, 30)
    assert list((cli.state / "blobs").iterdir()) == []
    assert not (cli.state / "transfers").exists()
    plan = json.loads(cli.run("workflow", "submit", cli.spec(ROUND), "--dry-run", "-t", "json").out)
    first = plan["groups"][0]["tasks"][0]
    assert [one["url"] for one in (*first["inputs"], *first["outputs"])] == [
        "s3://b/data", "s3://b/data/a.txt", "s3://b/runs/{{workflow_id}}/", "s3://b/logs",
    ]  # fmt: skip


SIMPLE = """
workflow:
  name: simple
  tasks:
  - name: only
    command: [sh, -c, 'cp "{{input:0}}"/* "{{output}}"; while [ ! -e GO ]; do sleep 0.2; done']
    inputs: [{url: IN}]
    outputs: [{url: OUT}]
"""


def _simple(cli: Cli, source: str, destination: str, *, waits: bool = False) -> str:
    go = cli.folder / ("go" if waits else ".")
    return cli.spec(SIMPLE.replace("IN", source).replace("OUT", destination).replace("GO", str(go)))


def test_ssh_hosts_use_a_store_without_aws_variables_of_their_own(lab: Lab, s3: S3Server) -> None:
    cli, bucket = lab.cli, s3.bucket("b")
    _fill(bucket)
    # The environment of tasks has no variables of the store: `grep -c` prints 0.
    command = "env | grep -c AWS_; cat {{input:0}}/a.txt; hostname > {{output}}/$0"
    tasks = "".join(
        f"    - {{name: {name}, lead: {lead}, ranks: {{size: 1}}, command: [sh, -c, '{command}', {name}],\n"
        "       inputs: [{url: s3://b/data/a.txt}], outputs: [{url: s3://b/out}]}\n"
        for name, lead in (("one", "true"), ("two", "false"))
    )
    done = cli.run(
        "workflow", "submit", cli.spec(f"workflow:\n  name: far\n  groups:\n  - name: g\n    tasks:\n{tasks}"), "--wait"
    )
    assert done.code == 0, done.err
    assert len({task["node_name"] for task in cli.tasks("far-1").values()}) == 2
    assert {line for line in done.out.splitlines() if line.startswith("[")} == {"[one] 0", "[one] A", "[two] 0", "[two] A"}
    assert sorted(path.name for path in (bucket / "out").iterdir()) == ["one", "two"]


def test_an_input_url_with_nothing_below_it_is_an_empty_directory(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _fill(bucket)
    spec = cli.spec(
        "workflow:\n  name: scratch\n  tasks:\n  - name: only\n"
        "    command: [sh, -c, 'ls -A {{input:0}} | wc -l; echo step 1 > {{output}}/state']\n"
        "    inputs: [{url: s3://b/state}]\n    outputs: [{url: s3://b/state}]\n"
    )
    # The first run finds no state, and begins from scratch. The second one finds the state of the first.
    for number, found in enumerate(("0", "1"), 1):
        done = cli.run("workflow", "submit", spec, "--wait")
        assert done.code == 0, done.err
        assert [line for line in done.out.splitlines() if line.startswith("[only]")] == [f"[only] {found}"]
        warning = "Warning: only: there is no file at s3://b/state: the directory of its input is empty"
        assert (warning in cli.run("workflow", "query", f"scratch-{number}").out) is (found == "0")
    assert (bucket / "state" / "state").read_text() == "step 1\n"


def test_data_at_s3_without_any_credential_is_refused_at_submit(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    for name in [one for one in cli.environment if one.startswith("AWS_")]:
        del cli.environment[name]
    cli.environment |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
    spec = cli.spec(
        "workflow:\n  name: late\n  tasks:\n  - name: only\n    command: [sh, -c, 'echo x > {{output}}/x']\n"
        "    outputs: [{url: s3://b/out}]\n"
    )
    done = cli.run("workflow", "submit", spec)
    assert done.code == 3
    assert "s3://b/out: there are no usable credentials for it" in done.err
    assert "distflow credential set NAME --type DATA" in done.err
    assert "no workflows yet" in cli.run("workflow", "list").out
    assert cli.run("workflow", "submit", spec, "--dry-run").code == 0


def test_a_failure_names_the_url_and_no_secret(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _fill(bucket)
    for source, destination, message in (
        ("s3://none/x", "s3://b/out", "only: an input cannot be fetched: s3://none/x: there is no such bucket"),
        ("s3://b/data/a.txt", "s3://none/out", "only: its output cannot be written: s3://none/out: there is no such bucket"),
    ):
        ident = cli.submit(_simple(cli, source, destination))
        body = cli.await_status(ident, "FAILED")
        assert (body["reason"], body["groups"][0]["reason"]) == ("DATA", "DATA")
        assert message in _message(cli, ident)
    assert not (bucket / "out").exists()
    wait_until(lambda: cli.supervisor() is None, 30)
    cli.environment["AWS_SECRET_ACCESS_KEY"] = "wrong-4711"
    ident = cli.submit(_simple(cli, "s3://b/data/a.txt", "s3://b/out"))
    cli.await_status(ident, "FAILED")
    assert "s3://b/data/a.txt: the store refused access: " in _message(cli, ident)
    found = subprocess.run(["grep", "-rl", "wrong-4711", str(cli.state)], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_a_task_that_fails_writes_no_output_to_its_url(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    spec = cli.spec(
        "workflow:\n  name: fails\n  tasks:\n  - name: only\n    command: [sh, -c, 'echo x > {{output}}/x; exit 3']\n"
        "    outputs: [{url: s3://b/out}]\n"
    )
    assert cli.run("workflow", "submit", spec, "--wait").code == 1
    assert list(bucket.iterdir()) == []


def test_a_transfer_waits_for_a_store_that_is_unavailable_for_a_moment(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _fill(bucket)
    s3.stop()
    with socket.create_server(("127.0.0.1", s3.port)) as away:
        away.settimeout(60)
        ident = cli.submit(_simple(cli, "s3://b/data/a.txt", "s3://b/out"))
        # This request fails.
        away.accept()[0].close()
    s3.start()
    cli.await_status(ident, "COMPLETED")
    assert (bucket / "out" / "a.txt").read_text() == "A\n"


def test_a_supervisor_killed_during_transfers_loses_nothing(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _fill(bucket)
    s3.freeze()
    ident = cli.submit(_simple(cli, "s3://b/data/a.txt", "s3://b/out", waits=True))
    wait_until(lambda: "checking inputs: s3://b/data/a.txt" in _message(cli, ident), 60)
    cli.kill_supervisor()
    s3.thaw()
    cli.await_running(ident)
    s3.freeze()
    (cli.folder / "go").touch()
    wait_until(lambda: "writing outputs: s3://b/out" in _message(cli, ident), 60)
    assert cli.query(ident)["status"] == "RUNNING"
    cli.kill_supervisor()
    s3.thaw()
    cli.await_status(ident, "COMPLETED")
    assert (bucket / "out" / "a.txt").read_text() == "A\n"
    events = cli.run("workflow", "events", ident).out
    assert events.count("its input is fetched by its node") == 1
    assert events.count("its output is at") == 1


def test_a_cancel_does_not_wait_for_data(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    s3.freeze()
    ident = cli.submit(_simple(cli, "s3://b/data", "s3://b/out"))
    wait_until(lambda: "checking inputs" in _message(cli, ident), 60)
    assert cli.run("workflow", "cancel", ident, "--wait", "30").code == 0
    assert cli.query(ident)["status"] == "FAILED_CANCELED"
    s3.thaw()


def test_canceled_transfers_do_not_block_others(cli: Cli, s3: S3Server) -> None:
    # As many transfers as run at the same time wait for a stopped store.
    s3.stop()
    tasks = "".join(f"  - {{name: t{number}, command: ['true'], inputs: [{{url: s3://b/x}}]}}\n" for number in range(4))
    many = cli.submit(cli.spec(f"workflow:\n  name: many\n  tasks:\n{tasks}", "many.yaml"))
    wait_until(lambda: all("checking inputs" in one["message"] for one in cli.query(many)["groups"]), 60)
    (cli.folder / "a.txt").write_text("A\n")
    one = cli.submit(_simple(cli, f"file://{cli.folder}/a.txt", f"file://{cli.folder}/out"))
    wait_until(lambda: "inputs: " in _message(cli, one), 60)
    assert cli.run("workflow", "cancel", many).code == 0
    cli.await_status(one, "COMPLETED", timeout=30)


@pytest.mark.parametrize("what", ["an input", "a checkpoint"])
def test_a_missing_driver_is_reported_at_submit(cli: Cli, what: str) -> None:
    spec = _simple(cli, "s3://b/x", "s3://b/out")
    if what == "a checkpoint":
        task = "{name: only, command: [echo], checkpoint: [{path: ckpt, url: s3://b/x, frequency: 1m}]}"
        spec = cli.spec(f"workflow: {{name: saves, tasks: [{task}]}}")
    hide = "import sys; sys.modules['s3fs'] = None; from distflow.cli.app import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", hide, "workflow", "submit", spec], capture_output=True, text=True, check=False,
        env=cli.environment, cwd=cli.folder,
    )  # fmt: skip
    assert done.returncode == 2
    assert "`only`: s3://b/x needs the driver s3fs, which is not installed" in done.stderr
    assert "pip install 'distflow-cli[data]'" in done.stderr
    assert json.loads(cli.run("workflow", "list", "-t", "json").out)["workflows"] == []


def test_folders_and_web_servers_need_no_driver(cli: Cli) -> None:
    served = cli.folder / "served"
    served.mkdir()
    (served / "a.txt").write_text("from the web\n")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(served))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        spec = _simple(cli, f"http://127.0.0.1:{server.server_port}/a.txt", f"file://{cli.folder}/out/x")
        done = cli.run("workflow", "submit", spec, "--wait")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.code == 0, done.err
    assert (cli.folder / "out" / "x" / "a.txt").read_text() == "from the web\n"
