"""``distflow run``: from a script to its results, without a spec."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scenarios.conftest import Cli
from scenarios.lab import Lab

TRAIN = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(int(sys.argv[1])):
    samples = torch.randn(16, 4)
    loss = (model(samples) - samples.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.3f}", flush=True)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "outputs/model.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def project(cli: Cli) -> Path:
    made = cli.folder / "project"
    made.mkdir()
    return made


@pytest.mark.torch
@pytest.mark.ssh
def test_a_script_trains_on_two_hosts_and_its_model_arrives(lab: Lab, project: Path, forking_site: str) -> None:
    lab.configure(environment={"PYTHONPATH": forking_site})
    (project / "train.py").write_text(TRAIN)
    (project / "hosts.txt").write_text("gpu1\ngpu2\n")
    done = lab.cli.run("run", "train.py", "--gpus", "0", "--hostfile", "hosts.txt", "--", "3", cwd=project)
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[0] == "train-1"
    assert "rank 0 of 2: loss" in done.out
    assert "rank 1 of 2: loss" in done.out
    assert (project / "outputs" / "model.pt").stat().st_size > 500
    assert {task["node_name"] for task in lab.cli.tasks("train-1").values()} == {"gpu1", "gpu2"}


def test_a_command_gets_the_project_and_its_results_are_fetched(cli: Cli, project: Path) -> None:
    (project / "kept.txt").write_text("kept")
    for folder in ("data", "outputs", "found", "env", ".venv"):
        (project / folder).mkdir()
        (project / folder / "pyvenv.cfg").touch()
    (project / ".gitignore").write_text("data/\n")
    command = [
        "sh",
        "-c",
        'find . -type f | sort; echo "$1" > outputs/a; echo b > "$DISTFLOW_OUTPUT/b"; exit 3',
        "look",
        "--set",
        "a=1",
    ]
    done = cli.run("run", "--name", "look", "--to", "found", "--", *command, cwd=project)
    assert done.code == 1
    assert done.out.splitlines() == ["look-1", "[node-0] ./.gitignore", "[node-0] ./kept.txt"]
    assert "fetched 2 files, 8 B, to found" in done.err
    assert {path.name: path.read_text() for path in (project / "found").iterdir() if path.name != "pyvenv.cfg"} == {
        "a": "--set\n",
        "b": "b\n",
    }

    # The printed spec gives the same output: results of the first run are not sent to the task.
    spec = cli.run("run", "--print-spec", "--name", "look", "--", *command, cwd=project).out
    (cli.folder / "look.yaml").write_text(spec.replace("localpath: .", "localpath: project"))
    resubmitted = cli.run("workflow", "submit", "../look.yaml", "--wait", cwd=project)
    assert (resubmitted.code, resubmitted.out.splitlines()[1:]) == (1, done.out.splitlines()[1:])
    assert cli.run("run", "--dry-run", "--", *command, cwd=project).out.startswith("workflow sh")

    # Directories with results are not sent. The next run into the same directory moves earlier results to `earlier-runs`.
    twice = cli.run("run", "--name", "twice", "--to", "found", "--", "sh", "-c", "ls -A; echo c > outputs/c", cwd=project)
    assert twice.out.splitlines()[1:] == ["[node-0] .gitignore", "[node-0] kept.txt", "[node-0] outputs"]
    assert "Not sent, because they hold results: found\n" in twice.err
    assert "note: the directory also contains other files" in twice.err
    for name, moved in (("first", False), ("second", True)):
        done = cli.run("run", "--name", name, "--to", "new", "--", "sh", "-c", 'echo "$0" > outputs/"$0"', name, cwd=project)
        note = "note: the directory had the results of another workflow; they were moved to new/earlier-runs/first-1\n"
        assert (note in done.err) is moved
    assert (project / "new/second").read_text() == "second\n"
    assert (project / "new/earlier-runs/first-1/first").read_text() == "first\n"
    assert sorted(path.name for path in (project / "new").iterdir()) == [".distflow-results", "earlier-runs", "second"]

    # A script for Slurm runs with the commands before its `srun`.
    (project / "job.sh").write_text("#SBATCH -J slurmy --time=10\nsource prepare.sh\nsrun ./show.sh\n")
    (project / "prepare.sh").write_text("export PREPARED=yes\n")
    (project / "show.sh").write_text("#!/bin/sh\necho prepared: $PREPARED\n")
    (project / "show.sh").chmod(0o755)
    slurmy = cli.run("run", "--from-sbatch", "job.sh", "--setup", ". ./prepare.sh", "--dry-run", cwd=project)
    assert slurmy.out.startswith("workflow slurmy in pool local\n")
    slurmy = cli.run("run", "--from-sbatch", "job.sh", cwd=project)
    assert slurmy.out.splitlines() == ["slurmy-1", "[node-0] prepared: yes"], slurmy.err
    assert "Running `./show.sh` on 1 node, after `source prepare.sh`\n" in slurmy.err

    options = ["--detach", "--name", "later", "--to", "my results", "--python", sys.executable]
    detached = cli.run("run", *options, "--", "python3", "-c", "pass", cwd=project)
    assert f"Running `{sys.executable} -c pass` on 1 node\n" in detached.err
    assert detached.err.endswith("To fetch the results later: distflow workflow fetch later-1 --to 'my results'\n")
    cli.await_status("later-1", "COMPLETED")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "error: the script `train.py` does not exist"),
        (["kept.py", "--lr", "1"], "error: `distflow run` has no option `--lr`\nwrite options of your script after `--`"),
        (["kept.py", "--node", "2"], "did you mean `--nodes`? Or write options"),
        (
            ["--nodes", "3", "--", "torchrun", "--nnodes", "2", "kept.py"],
            "error: the command requests 2 nodes, but --nodes is 3",
        ),
        (
            ["kept.py", "--gpus", "1"],
            "<spec of distflow run, see --print-spec>:7: error: group `training` can never run in pool `local`",
        ),
        (["hosts.yaml"], "error: `hosts.yaml` is a spec, not a command\ndistflow submit hosts.yaml"),
        (["kept.py", "--name", "1"], "`workflow.name` must be a name"),
        ([], "error: there is no command to run"),
        (["--from-sbatch", "absent.sh"], "error: absent.sh cannot be read"),
        (["--from-sbatch", "job.sh", "kept.py"], "error: --from-sbatch and a command cannot be combined"),
        (["--from-sbatch", "job.sh"], "error: job.sh: the script `gone.py` does not exist"),
        (
            ["--from-sbatch", "two.sh", "--nodes", "3"],
            "error: two.sh requests 2 nodes, but --nodes is 3\nomit --nodes, or change two.sh",
        ),
    ],
)
def test_wrong_input_starts_nothing(cli: Cli, project: Path, arguments: list[str], message: str) -> None:
    (project / "kept.py").touch()
    (project / "job.sh").write_text("#SBATCH --nodes=1\nsrun python gone.py\n")
    (project / "two.sh").write_text("#SBATCH --nodes=2\nsrun python kept.py\n")
    done = cli.run("run", *arguments, cwd=project)
    assert done.code == 2
    assert message in done.err
    assert not cli.supervisor()
