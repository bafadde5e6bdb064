"""Checkpoints of real tasks: they are written while a task runs and when it ends, and the next attempt gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.storage.files import is_part
from distflow.testing.s3 import S3Server
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

COUNTING = """
workflow:
  name: counting
  retry: {backoff: 0}
  tasks:
  - name: train
    command:
    - sh
    - -c
    - |
      mkdir -p /tmp/models; cd /tmp/models
      n=$(cat last 2> /dev/null || echo 0); echo "resumes at $n"
      while [ $n -lt 6 ]; do
        n=$((n + 1)); echo $n > last.new; mv last.new last; echo $n > step-$n
        [ $n != 3 ] || [ $DISTFLOW_RETRY_ID != 0 ] || exit 75
        sleep 0.1
      done
    exitActions: {RESCHEDULE: 75}
    checkpoint:
    - {path: /tmp/models, url: "URL", frequency: 1h}
"""


@pytest.mark.parametrize(("backend", "path", "name"), [("local", ".", "work"), ("ssh", "/tmp/models", "models")])
def test_the_next_attempt_continues_from_the_checkpoint(
    backend: str, path: str, name: str, cli: Cli, s3: S3Server, request: pytest.FixtureRequest
) -> None:
    bucket = s3.bucket("b")
    if backend == "ssh":
        request.getfixturevalue("lab")
    spec = cli.spec(COUNTING.replace("URL", "s3://b/runs/{{workflow_id}}").replace("/tmp/models", path))
    done = cli.run("workflow", "submit", spec, "--wait")
    assert done.code == 0, done.err
    resumed = [line for line in done.out.splitlines() if "resumes" in line]
    assert resumed == ["[train] resumes at 0", "[train retry-1] resumes at 3"]
    kept = bucket / "runs" / "counting-1" / name
    assert (kept / "last").read_text() == "6\n"
    assert sorted(path.name for path in kept.iterdir() if path.name[0] != ".") == ["last", *(f"step-{n}" for n in range(1, 7))]
    events = cli.run("workflow", "events", "counting-1").out
    assert "[train] its checkpoint is at s3://b/runs/counting-1: " in events
    assert "[train retry-1] its checkpoint is at s3://b/runs/counting-1: " in events
    # The state directory keeps no copy of the checkpoints.
    assert [path for path in (cli.state / "blobs").iterdir() if path.stat().st_size > 5000] == []


def test_checkpoints_are_written_while_the_task_runs_and_at_a_cancel(cli: Cli, tmp_path: Path) -> None:
    spec = f"""
workflow:
  name: running
  tasks:
  - name: train
    command:
    - sh
    - -c
    - |
      save() {{ date +%s%N > ckpt/new; mv ckpt/new ckpt/last; }}
      trap 'save; exit 1' TERM
      mkdir ckpt; n=0
      while sleep 0.05; do
        n=$((n + 1)); echo x >> ckpt/log
        [ $((n % 20)) != 0 ] || save
      done
    checkpoint:
    - {{path: ckpt, url: "file://{tmp_path}/kept", frequency: 1s, regex: 'ckpt/last'}}
"""
    ident = cli.submit(cli.spec(spec))
    last = tmp_path / "kept" / "ckpt" / "last"
    wait_until(last.exists, 60)
    first = last.read_text()
    wait_until(lambda: last.read_text() not in ("", first), 60)
    assert cli.tasks(ident)["train"]["status"] == "RUNNING"
    # The next checkpoint may be arriving under a temporary name.
    assert [path.name for path in last.parent.iterdir() if not is_part(path.name)] == ["last"]
    # A cancel writes one more checkpoint.
    before = last.read_text()
    assert cli.run("workflow", "cancel", ident, "--wait", "60").code == 0
    assert int(last.read_text()) > int(before)


SNAPSHOTS = """
workflow:
  name: snapshots
  retry: {backoff: 0}
  groups:
  - name: training
    shared: .
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: &command
      - sh
      - -c
      - |
        ln -sf /usr/share data
        attempt=$(basename $(realpath $(cat place)))
        echo rank {{rank_offset}} resumes at $(cat snapshot 2> /dev/null || echo 0) $(ls shards 2> /dev/null) of $attempt
        if [ $DISTFLOW_RETRY_ID = 1 ]; then
          if [ {{rank_offset}} = 1 ]; then touch READY-1; fi
          until [ -e READY-1 ]; do sleep 0.2; done
          exit 0
        fi
        mkdir shards; echo shard > shards/{{rank_offset}}
        if [ {{rank_offset}} = 1 ]; then touch READY; exec sleep 600; fi
        until [ -e READY ]; do sleep 0.2; done
        echo 3 > snapshot; exit 75
      files: &files
      - {path: place, contents: "{{output}}/.."}
      exitActions: &actions {RESCHEDULE: 75}
    - {name: worker, ranks: {size: 1}, command: *command, files: *files, exitActions: *actions}
"""


def test_all_ranks_resume_from_the_snapshot_of_one_rank_in_the_shared_working_directory(lab: Lab, cli: Cli) -> None:
    """The hosts have no shared file system."""
    done = cli.run("workflow", "submit", cli.spec(SNAPSHOTS.replace("READY", str(cli.folder / "ready"))), "--wait")
    assert done.code == 0, done.err + cli.run("workflow", "events", "snapshots-1").out
    assert sorted(line for line in done.out.splitlines() if "resumes at" in line) == [
        "[master retry-1] rank 0 resumes at 3 0 1 of 1", "[master] rank 0 resumes at 0 of 0",
        "[worker retry-1] rank 1 resumes at 3 0 1 of 1", "[worker] rank 1 resumes at 0 of 0",
    ]  # fmt: skip
    events = cli.run("workflow", "events", "snapshots-1").out
    assert (
        "files that changed during the copy, links that lead out of its directory, sockets, pipes or devices: work/data"
        in events
    )
    assert "different files" not in events


def test_checkpoints_continue_after_a_killed_supervisor(cli: Cli, tmp_path: Path) -> None:
    go = tmp_path / "go"
    spec = COUNTING.replace("URL", f"file://{tmp_path}/kept").replace("exit 75", "exit 9").replace("1h", "1s")
    ident = cli.submit(cli.spec(spec.replace("sleep 0.1", f"until [ -e {go} ]; do sleep 0.2; done")))
    wait_until((tmp_path / "kept" / "models" / "last").exists, 60)
    cli.kill_supervisor()
    go.touch()
    cli.await_status(ident, "FAILED")
    assert (tmp_path / "kept" / "models" / "last").read_text() == "3\n"


def test_training_continues_when_a_checkpoint_cannot_be_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file is in the way")
    done = cli.run("workflow", "submit", cli.spec(COUNTING.replace("URL", f"file://{tmp_path}/kept")), "--wait", timeout=300)
    assert done.code == 0, done.err
    assert "[train retry-1] resumes at 3" in done.out
    assert "its checkpoint was not written: " in cli.run("workflow", "events", "counting-1").out


def test_a_retry_after_a_lost_node_continues_from_the_last_checkpoint(lab: Lab, cli: Cli, tmp_path: Path) -> None:
    lab.configure(node_lost_after="2s", connect_timeout="2s")
    spec = COUNTING.replace("URL", f"file://{tmp_path}/kept").replace("exit 75", "exec sleep 600")
    ident = cli.submit(cli.spec(spec.replace("1h", "1s").replace("RESCHEDULE: 75", "RESCHEDULE: 3001")))
    last = tmp_path / "kept" / "models" / "last"
    wait_until(lambda: last.exists() and last.read_text() == "3\n", 60)
    lost = cli.tasks(ident)["train"]["node_name"]
    lab.servers[lost].stop()
    cli.await_status(ident, "COMPLETED", timeout=120)
    assert "[train retry-1] resumes at 3" in cli.logs(ident)
    assert last.read_text() == "6\n"
    lab.servers[lost].start()
    lab.await_abandoned_attempt_end(ident, "train")
