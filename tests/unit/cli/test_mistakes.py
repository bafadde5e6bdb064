"""Mistakes of new users. Each message names the problem, its location, its reason and a remedy, in at most six lines.

An excerpt of the file or a drawing of the ranks may follow, and is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distflow.cli.app import run
from unit.cli.screen import Screen, assert_golden
from unit.state.stored import completed_group, submit, workflow

MOST_LINES = 6
GANG = """\
workflow:
  name: train
  resources:
    default: {gpu: 8}
  groups:
  - name: training
    tasks:
    - name: master
      lead: true
      command: [python, train.py, --offset, 0, --size, 8, --world_size, 16]
    - name: worker
      command: [python, train.py, --offset, 8, --size, 8, --world_size, 16]
"""
ONE_TASK = """\
workflow:
  name: train
  tasks:
  - name: master
    command: [python, train.py]
"""
LAB = """\
default_pool: lab
pools:
  lab:
    backend: ssh
    nodes:
    - {name: gpu1, host: gpu1, gpus: 8}
    - {name: gpu2, host: gpu2, gpus: 8}
"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A command line, the files in its directory, and parts of the expected message."""

    command: str
    where: str
    """The location of the mistake: a file and line, or a command, option or name."""
    remedy: str
    files: Mapping[str, str] = field(default_factory=dict)


def _spec(old: str, new: str, where: str, remedy: str, *, base: str = ONE_TASK) -> Mistake:
    """Return a mistake in a spec: ``old`` was replaced by ``new``."""
    assert base.count(old) == 1, old
    files = {"train.yaml": base.replace(old, new)} | ({"distflow.yaml": LAB} if base is GANG else {})
    return Mistake(command="submit train.yaml --dry-run", files=files, where=where, remedy=remedy)


MISTAKES: Mapping[str, Mistake] = {
    # the spec's file
    "mistyped file": Mistake(
        command="submit trian.yaml --dry-run", files={"train.yaml": ONE_TASK}, where="trian.yaml", remedy="train.yaml"
    ),
    "directory instead of a spec": Mistake(
        command="submit . --dry-run", files={"train.yaml": ONE_TASK}, where=".: error", remedy="name a YAML file"
    ),
    "file that is not text": Mistake(
        command="submit model.pt --dry-run", files={"model.pt": "PK\x03\x04\x00"}, where="model.pt", remedy="file"
    ),
    "indentation": _spec("    command", "   command", "train.yaml:5", "check its indentation"),
    "tabulator": _spec("    command", "\tcommand", "train.yaml:5", "spaces"),
    "colon in a text": _spec("name: train\n", "name: train: big\n", "train.yaml:2", "put the value into quotes"),
    "unknown key": _spec("command:", "comand:", "train.yaml:5", "did you mean `command`?"),
    "missing key": _spec("    command: [python, train.py]\n", "", "train.yaml:4", "command"),
    "wrong type": _spec("command: [python, train.py]", "command: 5", "train.yaml:5", "a list of strings"),
    "mistyped launcher": _spec(
        "    command", "    launcher: torchrum\n    command", "train.yaml:5", "did you mean `torchrun`?"
    ),
    "invalid name": _spec("name: train\n", "name: my training\n", "train.yaml:2", "letters"),
    "task name twice": _spec("name: worker", "name: master", "train.yaml:11", "rename", base=GANG),
    "key twice": _spec("name: train\n", "name: train\n  name: test\n", "train.yaml:3", "keep one"),
    "script instead of a spec": Mistake(
        command="submit train.py --dry-run", files={"train.py": ""}, where="train.py", remedy="distflow run train.py"
    ),
    "spec instead of a script": Mistake(
        command="run train.yaml --dry-run",
        files={"train.yaml": ONE_TASK},
        where="train.yaml",
        remedy="distflow submit train.yaml",
    ),
    "option of the script": Mistake(
        command="run my.py --nodes 2 --epochs 2", where="--epochs", remedy="distflow run my.py … -- --epochs 2"
    ),
    "option of a command": Mistake(command="run ./go.sh -x", where="`-x`", remedy="distflow run ./go.sh -- -x"),
    "more nodes than machines": Mistake(
        command="run my.py --hostfile hosts.txt --nodes 3 --dry-run",
        files={"my.py": "", "hosts.txt": "gpu1\ngpu2\n"},
        where="hosts.txt has 2 machines",
        remedy="--nodes requests 3",
    ),
    "spec of run": Mistake(
        command="run my.py --gpus 99 --dry-run", files={"my.py": ""}, where="<spec of distflow run", remedy="pool list"
    ),
    # ranks
    "gap between ranks": _spec("--offset, 8", "--offset, 9", "train.yaml:12", "8", base=GANG),
    "ranks held twice": _spec("--offset, 8", "--offset, 4", "train.yaml:12", "8", base=GANG),
    "different world sizes": _spec(
        "8, --size, 8, --world_size, 16", "8, --size, 8, --world_size, 8", "train.yaml:12", "16", base=GANG
    ),
    "more ranks than GPUs": _spec("gpu: 8", "gpu: 4", "train.yaml:10", "gpu", base=GANG),
    # references of a spec
    "missing script": _spec(
        "    command", "    files: [{path: train.py, localpath: trian.py}]\n    command", "train.yaml:5", "trian.py"
    ),
    "unknown resource": _spec("    command", "    resource: big\n    command", "train.yaml:5", "resources"),
    "bad amount of memory": _spec("gpu: 8", "gpu: 8, memory: 64 gigs", "train.yaml:4", "`30Gi`", base=GANG),
    "bad duration": _spec("  tasks", "  timeout: {exec_timeout: two days}\n  tasks", "train.yaml:3", "`2h`"),
    "unknown token": _spec("train.py]", "'{{hots:master}}']", "train.yaml:5", "did you mean `{{host:…}}`?"),
    "unknown task in an input": _spec("    command", "    inputs: [{task: prepare}]\n    command", "train.yaml:5", "tasks"),
    "unknown credential": _spec(
        "    command",
        "    credentials: {huggingface: {HF_TOKEN: token}}\n    command",
        "train.yaml:5",
        "distflow credential set",
    ),
    "missing template variable": _spec("train.py]", "train.py, '--lr={{ lr }}']", "train.yaml:5", "--set"),
    "pool of a spec": _spec("  tasks", "  pool: labb\n  tasks", "labb", "pools: `local`"),
    "too many GPUs": Mistake(
        command="submit train.yaml --pool lab --dry-run",
        files={"train.yaml": GANG.replace("gpu: 8", "gpu: 16"), "distflow.yaml": LAB},
        where="train.yaml:6",
        remedy="distflow pool list",
    ),
    # options and arguments
    "unknown command": Mistake(command="sumbit train.yaml", where="distflow sumbit", remedy="did you mean `submit`?"),
    "unknown option": Mistake(
        command="submit train.yaml --prioirty HIGH", where="distflow workflow submit", remedy="`--priority`"
    ),
    "missing argument": Mistake(command="logs", where="distflow workflow logs", remedy="--help"),
    "number expected": Mistake(command="list --count many", where="`--count`", remedy="a whole number of at least 1"),
    "unknown priority": Mistake(
        command="submit train.yaml --priority urgent", files={"train.yaml": ONE_TASK}, where="urgent", remedy="HIGH"
    ),
    "unknown status": Mistake(command="list --status DONE", where="DONE", remedy="COMPLETED"),
    "bad date": Mistake(command="list --submitted-after 11.04.2025", where="--submitted-after", remedy="YYYY-MM-DD"),
    "setting without a value": Mistake(
        command="submit train.yaml --set epochs", files={"train.yaml": ONE_TASK}, where="--set", remedy="NAME=VALUE"
    ),
    "missing environment variable": Mistake(
        command="submit train.yaml --set-env WANDB_API_KEY",
        files={"train.yaml": ONE_TASK},
        where="--set-env",
        remedy="NAME=VALUE",
    ),
    "bad label": Mistake(
        command="submit train.yaml --label team", files={"train.yaml": ONE_TASK}, where="--label", remedy="KEY=VALUE"
    ),
    "bad port": Mistake(command="workflow port-forward digits-1 master --port http", where="--port", remedy="8080:80"),
    "bad URL": Mistake(command="data list s4://bucket/data", where="s4://", remedy="s3"),
    "bad pattern": Mistake(command="data list file:///tmp --regex (", where="`(`", remedy="write a Python regular expression"),
    # workflows, tasks and nodes
    "unknown id": Mistake(command="status digits-7", where="digits-7", remedy="digits-1"),
    "mistyped name": Mistake(command="logs digist", where="digist", remedy="digits-1"),
    "unknown task": Mistake(command="logs digits-1 --task wroker", where="wroker", remedy="did you mean `worker`?"),
    "unknown rank": Mistake(command="logs digits-1 --rank 99", where="rank 99", remedy="worker 8-15"),
    "command in an ended task": Mistake(
        command="workflow exec digits-1 master", where="master", remedy="distflow workflow logs digits-1"
    ),
    "stop of an ended workflow": Mistake(command="stop digits-1", where="digits-1", remedy="distflow workflow query digits-1"),
    "unknown pool": Mistake(
        command="pool check --pool labb", files={"distflow.yaml": LAB}, where="labb", remedy="did you mean `lab`?"
    ),
    "unknown node": Mistake(command="resource info gpu3", files={"distflow.yaml": LAB}, where="gpu3", remedy="gpu1"),
    "name that is taken": Mistake(
        command="credential set wandb --payload key=2", where="wandb", remedy="distflow credential delete wandb"
    ),
    # the configuration and hostfiles
    "word of a hostfile": Mistake(
        command="pool list --hostfile hosts",
        files={"hosts": "gpu1 slots=8\ngpu2 slot=8\n"},
        where="hosts:2",
        remedy="did you mean `slots`?",
    ),
    "missing hostfile": Mistake(
        command="pool list --hostfile host.txt",
        files={"hosts.txt": "gpu1\n"},
        where="host.txt",
        remedy="did you mean `hosts.txt`?",
    ),
    "spec instead of a hostfile": Mistake(
        command="pool list --hostfile train.yaml",
        files={"train.yaml": GANG},
        where="train.yaml",
        remedy="does not look like a hostfile",
    ),
    "host names of a hostfile": Mistake(
        # No name service has a name with two consecutive dots.
        command="submit train.yaml --hostfile hosts --dry-run",
        files={"train.yaml": ONE_TASK, "hosts": "127.0.0.1\ngpu..1\nada@gpu..2 slots=8\n"},
        where="hosts:3",
        remedy="correct the name",
    ),
    "unknown backend": Mistake(
        command="pool list",
        files={"distflow.yaml": LAB.replace("backend: ssh", "backend: shh")},
        where="distflow.yaml:4",
        remedy="did you mean `ssh`?",
    ),
    "configuration that others can change": Mistake(
        command="pool list", files={"distflow.yaml": LAB}, where="distflow.yaml", remedy="chmod"
    ),
    "unreachable host": Mistake(
        command="node reap --node gpu1",
        files={"distflow.yaml": LAB.replace("host: gpu1", "host: 127.0.0.1, port: 1, user: ada")},
        where="gpu1",
        remedy="distflow pool check --pool lab --node gpu1",
    ),
    "file in the home directory of an unknown user": Mistake(
        command="credential set deploy --payload-file key=~no.such.user/key",
        where="--payload-file key",
        remedy="write the whole path",
    ),
}


def test_every_mistake_is_reported_with_its_location_and_a_remedy(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(screen.store, workflow([completed_group()]))
    assert run(["credential", "set", "wandb", "--payload", "key=1"]) == 0
    pages, faults = [], []
    for name, mistake in MISTAKES.items():
        folder = tmp_path / re.sub("[^a-z]", "-", name)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for file, text in mistake.files.items():
            (folder / file).write_text(text)
        if name == "configuration that others can change":
            (folder / "distflow.yaml").chmod(0o666)
        capsys.readouterr()
        code = run(mistake.command.split(" "))
        out, err = capsys.readouterr()
        shown = (out + err).replace(f"{folder}/", "").replace(str(tmp_path), "TMP")
        pages.append(f"# {name}\n$ distflow {mistake.command}\n{shown}")
        message = re.sub(r"\n\n(    .*\n)+", "\n", shown).rstrip().splitlines()
        if len(message) > MOST_LINES:
            faults.append(f"{name}: {len(message)} lines")
        faults += [f"{name}: {word!r} is missing" for word in (mistake.where, mistake.remedy) if word not in shown]
        faults += [f"{name}: exit code {code}"] if code not in (2, 3) else []
    assert_golden("mistakes.txt", "\n".join(pages))
    assert len(MISTAKES) >= 40
    assert not faults, "\n".join(faults)
