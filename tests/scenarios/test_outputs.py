"""Output files of running and of ended tasks are listed and fetched over SSH."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from distflow.client import Client, fetch_output_files, find_workflow
from distflow.client.outputs import OutputProgress
from scenarios.lab import Lab

SPEC = """
workflow:
  name: train
  resources: {default: {gpu: 2}}
  groups:
  - name: training
    tasks:
    - name: master
      lead: true
      command: [sh, -c, "mkdir {{output}}/logs; echo 1 > {{output}}/logs/a.txt; echo up; while [ ! -e GO ]; do sleep 0.1; done;
        head -c 20000000 /dev/urandom > {{output}}/model.pt; echo w > loss.csv"]
    - {name: worker, command: [sh, -c, "echo 2 > {{output}}/worker.txt; while [ ! -e GO ]; do sleep 0.1; done"]}
"""


def file_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_outputs_of_running_and_ended_tasks_are_fetched(lab: Lab) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    workflow = cli.submit(cli.spec(SPEC.replace("GO", str(go))))
    cli.await_running(workflow)
    cli.await_log(workflow, "up")
    assert f"Outputs      on the nodes: distflow workflow outputs {workflow}\n" in cli.run("workflow", "query", workflow).out
    done = cli.run("workflow", "outputs", workflow, "--task", "master")
    assert (done.code, [line.split()[-1] for line in done.out.splitlines()[2:]]) == (0, ["logs/a.txt"])
    go.touch()
    cli.await_status(workflow, "COMPLETED")

    done = cli.run("status", workflow)
    assert "Outputs      on the nodes at least until " in done.out
    assert f": distflow workflow fetch {workflow}\n" in done.out
    assert cli.query(workflow)["outputs_until"] > cli.query(workflow)["end_time"]
    for command in (("exec", workflow, "master"), ("rsync", "download", workflow, "master", "x:.")):
        if command[0] == "exec" or shutil.which("rsync"):
            done = cli.run("workflow", *command)
            assert done.code == 2
            assert f"its files: distflow workflow fetch {workflow} --task master" in done.err

    done = cli.run("workflow", "outputs", workflow, "-t", "json")
    listed = json.loads(done.out)
    assert {one["name"]: [(file["path"], file["bytes"]) for file in one["files"]] for one in listed["tasks"]} == {
        "master": [("logs/a.txt", 2), ("model.pt", 20_000_000)], "worker": [("worker.txt", 2)]
    }  # fmt: skip
    done = cli.run("workflow", "outputs", workflow)
    assert f"3 files, 19 MiB. To copy them: distflow workflow fetch {workflow}" in done.err

    done = cli.run("fetch", "-")
    assert (done.code, done.out, done.err) == (0, f"fetched 3 files, 19 MiB, to {workflow}\n", "")
    fetched_to = cli.folder / workflow
    assert file_names(fetched_to) == [".distflow-results", "master/logs/a.txt", "master/model.pt", "worker/worker.txt"]
    (model,) = cli.folder.glob("gpu*/**/training/master/0/output/model.pt")
    assert (fetched_to / "master" / "model.pt").read_bytes() == model.read_bytes()
    assert cli.run("fetch", workflow).out == f"fetched 0 files, 0 B, to {workflow}; 3 were already there\n"

    assert cli.run("fetch", workflow, "{{output}}/", "--to", workflow).out.endswith("; 3 were already there\n")
    done = cli.run("fetch", workflow, "*.pt", "--to", "results", "-t", "json")
    assert json.loads(done.out)["tasks"] == [{"name": "master", "task_name": "master", "folder": "results"}]
    assert file_names(cli.folder / "results") == ["model.pt"]
    assert cli.run("fetch", workflow, "--workdir", "--to", "work").code == 0
    assert file_names(cli.folder / "work") == ["loss.csv"]

    done = cli.run("fetch", workflow, "nothing", "--task", "worker")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: no output file matches `nothing`\nfiles: `worker.txt`\n"

    # A transfer continues after its connection broke.
    nodes = {name: task["node_name"] for name, task in cli.tasks(workflow).items()}
    done_bytes: list[int] = []

    def break_once(progress: OutputProgress) -> None:
        done_bytes.append(progress.done)
        if progress.done > 2 and not broken:
            broken.append(progress.done)
            lab.servers[nodes["master"]].restart()

    broken: list[int] = []
    with Client(environ=cli.environment, folder=cli.folder) as client:
        record = find_workflow(client, workflow)
        fetched = fetch_output_files(client, record, cli.folder / "again", tasks=["master"], on_progress=break_once)
    assert (fetched.errors, fetched.files, fetched.unchanged, broken != []) == ((), 2, 0, True)
    assert min(done_bytes[done_bytes.index(broken[0]) :]) == broken[0], "the transfer did not begin again at zero"
    assert (cli.folder / "again" / "model.pt").read_bytes() == model.read_bytes()

    # Files of the other nodes are fetched although one node does not answer.
    node = nodes["worker"]
    lab.servers[node].stop()
    done = cli.run("fetch", workflow, "--to", "rest")
    assert done.code == 3
    assert file_names(cli.folder / "rest") == ["logs/a.txt", "model.pt"]
    assert f"error: {node}: the files of worker of {workflow} cannot be read: " in done.err

    # `node clean` removes the outputs.
    lab.servers[node].start()
    done = cli.run("node", "clean", "--older-than", "0s")
    assert done.code == 0, done.err
    done = cli.run("fetch", workflow, "--task", "master", "--to", "gone")
    assert done.code == 3
    assert f"the files of master of {workflow} are gone" in done.err
    assert "`distflow node clean` removes the files of ended workflows" in done.err
