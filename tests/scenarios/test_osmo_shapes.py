"""Specs with patterns of OSMO's own specs: each must run as in OSMO, or cause a warning at the line that does not."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from distflow.testing.daemons import free_port
from scenarios.conftest import Cli
from scenarios.lab import Lab, json_lines

TUTORIAL = """\
workflow:
  name: pytorch-dist
  resources:
    default: {cpu: 1, memory: 1Gi, storage: 1Gi}
  groups:
  - name: training
    tasks:
    - name: master
      lead: true
      image: nvcr.io/nvidia/pytorch:24.03-py3
      command: [bash]
      args: [/tmp/entry.sh]
      volumeMounts: [/dev/shm]
      files:
      - path: /train_dist.py
        localpath: train_dist.py
      - path: /tmp/entry.sh
        contents: |
          set -x
          mkdir -p {{output}}/models
          export MASTER_ADDR=localhost
          export MASTER_PORT={{port}}
          python3 /train_dist.py --offset 0 --size 1 --world_size 2 --epochs 1 --output {{output}}/models
          echo "Finished training!"
      outputs:
      - dataset:
          name: models
          path: models
    - name: worker
      image: nvcr.io/nvidia/pytorch:24.03-py3
      command: [bash]
      args: [/tmp/entry.sh]
      volumeMounts: [/dev/shm]
      files:
      - path: /train_dist.py
        localpath: train_dist.py
      - path: /tmp/entry.sh
        contents: |
          export MASTER_ADDR=$(nslookup {{host:master}} | grep -oP "\\\\d+.\\\\d+.\\\\d+.\\\\d+" | tail -n 1)
          export MASTER_PORT={{port}}
          echo "the master is at $MASTER_ADDR"
          while ! nc -w 30 -z {{host:master}} $MASTER_PORT; do
            echo "Waiting for the master..."
            sleep 1
          done
          python3 /train_dist.py --offset 1 --size 1 --world_size 2 --epochs 1
          echo "Finished training!"

default-values:
  port: 29500
"""


def skip_without(*programs: str) -> None:
    """Skip the test if a program is missing, because stand-ins would prove nothing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install bind9-dnsutils bind9-host netcat-openbsd")


@pytest.mark.ssh
@pytest.mark.torch
def test_the_two_node_tutorial_trains_with_real_nslookup_and_nc(
    lab: Lab, repository: Path, forking_site: str
) -> None:  # fmt: skip
    skip_without("nslookup", "nc")
    cli = lab.cli
    lab.configure(names=("gpu1", "gpu2"), environment={"PYTHONPATH": forking_site})
    shutil.copy(repository / "workflow_specs" / "train_dist.py", cli.folder)
    done = cli.run(
        "workflow", "submit", cli.spec(TUTORIAL), "--wait", "--set", f"port={free_port('')}", timeout=170
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    tasks, log = cli.tasks("pytorch-dist-1"), cli.logs("pytorch-dist-1")
    assert {task["node_name"] for task in tasks.values()} == {"gpu1", "gpu2"}
    assert f"[worker] the master is at 127.0.1.{tasks['master']['node_name'][-1]}" in log
    assert log.count("Finished training!") >= 2
    rows = json_lines(log)
    assert {row["rank"] for row in rows if row.get("event") == "started"} == {0, 1}
    assert [row["world_size"] for row in rows if row.get("event") == "started"] == [2, 2]
    (dataset,) = json.loads(cli.run("dataset", "list", "-t", "json").out)["datasets"]
    assert (dataset["name"], dataset["versions"]) == ("models", [1])
    assert dataset["latest"]["file_count"] >= 1


REFERENCES = """\
workflow:
  name: references
  tasks:
  - name: write
    command: [sh]
    args: [-c, 'echo "at $(FILE_PATH) in $(date +%Y | cut -c1-2)xx"; echo text > $(FILE_PATH); cat "$$(FILE_PATH)"; true']
    environment:
      FOLDER: "{{output}}"
      FILE_PATH: $(FOLDER)/answer.txt
"""


def test_references_to_variables_are_replaced_as_in_kubernetes(cli: Cli) -> None:
    done = cli.run("workflow", "submit", cli.spec(REFERENCES), "--wait")
    assert done.code == 0, done.err + done.out
    output = Path(cli.tasks("references-1")["write"]["output_dir"])
    assert (output / "answer.txt").read_text() == "text\n"
    log = cli.logs("references-1")
    assert f"[write] at {output}/answer.txt in 20xx" in log
    assert "FILE_PATH: not found" in log  # `$$(…)` is escaped, so the shell looked for a command of that name


EARLIER = """\
# Submit with a workflow that has ended: {{ workflow }}, {% raw %} and {{host:missing}} are in a comment.
workflow:
  name: later
  tasks:
  - name: read
    command: [bash, /tmp/run.sh]
    inputs:
    - task: "{{earlier}}:write"
    files:
    - path: /tmp/run.sh
      contents: |
        # Was: cat {{input:3}}/x on {{host:other}}
        cat {{input:write}}/answer.txt {{input:0}}/answer.txt

default-values:
  earlier: none-1
"""


def test_tokens_in_comments_only_cause_warnings_and_inputs_are_found_by_task_name(cli: Cli) -> None:
    text = "workflow: {name: first, tasks: [{name: write, command: [sh, -c, 'echo text > {{output}}/answer.txt']}]}\n"
    assert cli.run("workflow", "submit", cli.spec(text), "--wait").code == 0
    done = cli.run("workflow", "submit", cli.spec(EARLIER), "--wait", "--set", "earlier=first-1")
    assert done.code == 0, done.err + done.out
    assert cli.logs("later-1") == "[read] text\n[read] text\n"
    warnings = [line.partition("spec.yaml:")[2] for line in done.err.splitlines() if ": warning: " in line]
    assert warnings == [
        "12: warning: `{{input:3}}` does not name an input of this task",
        "12: warning: `{{host:other}}` does not name a task of this group",
    ]


RELATIVE = """\
workflow:
  name: relative
  tasks:
  - name: one
    image: ubuntu:24.04
    command: [bash, tmp/entry.sh]
    files:
    - path: /tmp/entry.sh
      contents: |
        echo text > tmp/answer.txt
        cat tmp/answer.txt
        sh helper.sh && sh ./helper.sh && sh /helper.sh
        cp helper.sh "{{output}}"/helper.sh
        cp helper.sh {{output}}/helper.sh && ls {{output}}
    - path: helper.sh
      contents: echo helped
"""


def test_relative_paths_start_at_the_working_directory_as_in_an_image(cli: Cli) -> None:
    done = cli.run("workflow", "submit", cli.spec(RELATIVE), "--wait")
    assert done.code == 0, done.err + done.out
    assert cli.logs("relative-1").replace("[one] ", "").splitlines() == ["text", "helped", "helped", "helped", "helper.sh"]


SHARING = """\
workflow:
  name: sharing
  groups:
  - name: talk
    tasks:
    - name: server
      lead: true
      image: ubuntu:24.04
      command: [sh, /tmp/serve.sh]
      files:
      - path: /tmp/serve.sh
        contents: |
          echo answer > /tmp/DIR/answer.txt; echo 1 > /tmp/DIR/$DISTFLOW_TASK.txt
    - name: client
      image: ubuntu:24.04
      command: [sh, /tmp/serve.sh]
      volumeMounts: [MOUNT]
      files:
      - path: /tmp/serve.sh
        contents: |
          : > /tmp/DIR/answer.txt; cat /tmp/DIR/answer.txt
          cat /tmp/DIR/own.txt || true
"""


@pytest.mark.parametrize(("mount", "warning_lines"), [("/var/tmp", ["21"]), ("FOLDER", [])])
def test_a_path_that_tasks_share_without_a_mount_causes_a_warning(cli: Cli, mount: str, warning_lines: list[str]) -> None:
    folder = cli.folder / "shared"
    folder.mkdir()
    text = SHARING.replace("MOUNT", mount).replace("FOLDER", str(folder)).replace("/tmp/DIR", str(folder))
    for command in ("validate", "submit"):
        done = cli.run("workflow", command, cli.spec(text), *(["--wait"] if command == "submit" else []))
        assert done.code == 0, done.err + done.out
        warnings = [line for line in done.err.splitlines() if "` share `" in line]
        assert [line.partition("spec.yaml:")[2].partition(":")[0] for line in warnings] == warning_lines
        assert all(f"`server`, `client` share `{folder}/answer.txt`" in line for line in warnings)


MOUNTS = """\
workflow:
  name: mounts
  tasks:
  - name: read
    image: ubuntu:24.04
    command: [sh, -c, 'cat HERE/x']
    volumeMounts: [/dev/shm, "HERE:HERE"]
"""


def test_a_missing_directory_of_volume_mounts_is_reported(cli: Cli) -> None:
    folder = cli.folder / "given"
    done = cli.run("workflow", "submit", cli.spec(MOUNTS.replace("HERE", str(folder))), "--wait")
    assert done.code == 1
    task = cli.tasks("mounts-1")["read"]
    assert task["status"] == "FAILED_START_ERROR"
    assert f"`volumeMounts`: `{folder}` does not exist on this node" in task["failure_message"]
    folder.mkdir()
    (folder / "x").write_text("there\n")
    assert cli.run("workflow", "submit", "spec.yaml", "--wait").code == 0
    assert cli.logs("mounts-2") == "[read] there\n"


CLIENT = """\
workflow:
  name: client
  tasks:
  - name: one
    command: [bash, -c, "osmo version && osmo data upload file://FOLDER/store given.txt && osmo data list file://FOLDER/store"]
    files:
    - {path: given.txt, contents: text}
"""


def test_tasks_can_call_distflow_as_osmo_through_a_symlink(cli: Cli) -> None:
    # A symlink in a directory of PATH, as docs/osmo.md recommends.
    program, folder = Path(sys.executable).parent / "distflow", cli.folder / "bin"
    folder.mkdir()
    (folder / "osmo").symlink_to(program)
    cli.configure(setup=f"export PATH={folder}:$PATH")
    done = cli.run("workflow", "submit", cli.spec(CLIENT.replace("FOLDER", str(cli.folder))), "--wait")
    assert done.code == 0, done.err + done.out
    assert (cli.folder / "store" / "given.txt").read_text() == "text"
    assert "given.txt" in cli.logs("client-1")


LENIENT = """\
workflow:
  name: lenient
  resources:
    default:
      cpu: {{cpu}}
      memory: {{memory}}
      storage:
      platform: {{platform}}
  timeout: {exec_timeout: , queue_timeout: 1h}
  tasks:
  - name: write
    image: ubuntu:24.04
    command: [sh, -c, "umask; echo text > {{output}}/answer.txt"]
    image: ubuntu:24.04
  - name: read
    image: ubuntu:24.04
    command: [sh, -c, 'cat {{input:0}}/answer.txt']
    inputs:
    - task: write

default-values:
  cpu: 1
  memory: 1Gi
  platform: none
"""


def test_empty_values_and_equal_duplicate_keys_are_accepted(cli: Cli) -> None:
    empty = [word for name in ("cpu", "memory", "platform") for word in ("--set", f"{name}=")]
    done = cli.run("workflow", "submit", cli.spec(LENIENT), "--wait", *empty)
    assert done.code == 0, done.err + done.out
    assert "image" in done.err
    mask = os.umask(0o022)
    os.umask(mask)
    assert cli.logs("lenient-1").splitlines() == [f"[write] {mask:04o}", "[read] text"]
    other = LENIENT.replace("image: ubuntu:24.04\n  - name", "image: debian:12\n  - name")
    refused = cli.run("workflow", "submit", cli.spec(other), *empty)
    assert refused.code == 2
    assert "image" in refused.err
