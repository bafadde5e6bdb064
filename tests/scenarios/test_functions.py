"""Functions as gang jobs: ``distflow.run`` in a program, on two SSH hosts and on this machine."""

from __future__ import annotations

import functools
import importlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import distflow
from distflow.errors import InputError
from distflow.testing.nodes import write_other_python
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab
from scenarios.lasting import lasting_supervisor

TRAIN = """
import json, sys
import distflow
from helpers.words import greeting


def train(scale, fails):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if fails and rank == 3:
        raise KeyError("no label")
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    print(greeting(rank), flush=True)
    return rank, total.item() * scale


if __name__ == "__main__":
    lab = distflow.Launcher(nodes=2, ranks=2, gpus=0)
    job = lab.submit(train, 10, fails=True)
    try:
        job.result(60)
    except KeyError as error:
        print(json.dumps([repr(error), str(error.__cause__)]))
    results = distflow.run(train, args=(10,), kwargs={"fails": False}, nodes=2, ranks=2, gpus=0, on_line=None)
    print(json.dumps([list(results), results[1][0], [task.node for task in results.workflow.tasks]]))
    print(json.dumps(sorted(line.text for line in results.workflow.logs())))
"""


TRUE = {"workflow": {"name": "true", "tasks": [{"name": "one", "command": "true"}]}}


@pytest.fixture
def project(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for a program, with the environment of ``cli``."""
    for name in ("DISTFLOW_STATE", "DISTFLOW_CONFIG", "HOME"):
        monkeypatch.setenv(name, cli.environment[name])
    made = cli.folder / "project"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def one_supervisor(cli: Cli) -> Iterator[None]:
    """One supervisor for all functions of the test."""
    with lasting_supervisor(cli):
        yield


@pytest.mark.torch
@pytest.mark.ssh
def test_a_function_runs_on_two_hosts_and_returns_the_values_of_all_ranks(lab: Lab, forking_site: str, project: Path) -> None:
    lab.configure(names=("gpu1", "gpu2"), environment={"PYTHONPATH": forking_site})
    (project / "helpers").mkdir()
    (project / "helpers" / "words.py").write_text("def greeting(rank):\n    return f'hello from {rank}'\n")
    (project / "train.py").write_text(TRAIN)
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    failed, values, lines = map(json.loads, done.stdout.splitlines())
    assert failed[0] == "KeyError('no label')"
    assert "rank 3 of train-1 (node-1 on gpu2):\nTraceback" in failed[1]
    assert 'train.py", line 14, in train' in failed[1]
    assert "runpy" not in failed[1]
    assert values == [[[rank, 100.0] for rank in range(4)], 1, ["gpu1", "gpu2"]]
    assert lines == [f"hello from {rank}" for rank in range(4)]


@pytest.mark.usefixtures("one_supervisor")
def test_errors_of_a_function_are_raised_with_their_cause(cli: Cli, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class TwoArguments(Exception):
        def __init__(self, text: str, number: int) -> None:
            super().__init__(f"{text} {number}")
            self.number = number

    def fails(how: str) -> object:
        import os
        import threading

        print("about to fail")
        if how == "two arguments":
            raise TwoArguments("unlucky", 13)
        if how == "unpicklable":
            error = ValueError("with a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            if hasattr(error, "add_note"):
                error.add_note("a note\nof two lines")
            raise error
        if how == "killed" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        if how == "killed":
            signal.signal(signal.SIGTERM, lambda *_: int("a consequence, and not the cause"))
            signal.pause()
        if how == "lock":
            return threading.Lock()
        raise SystemExit

    with pytest.raises(Exception, match="unlucky 13") as raised:
        distflow.run(fails, args=("two arguments",))
    assert (type(raised.value).__name__, raised.value.number) == ("TwoArguments", 13)  # type: ignore[attr-defined]
    assert "[node-0] about to fail\n" in capsys.readouterr().out
    with pytest.raises(
        distflow.WorkflowEnded, match=r"rank 0 of fails-2 \(node-0 on local\): ValueError: with a lock"
    ) as ended:
        distflow.run(fails, args=("unpicklable",))
    assert "in fails" in str(ended.value.__cause__)
    with pytest.raises(distflow.WorkflowEnded, match="rank 1 ended with SIGKILL"):
        distflow.run(fails, args=("killed",), ranks=2)
    with pytest.raises(distflow.WorkflowEnded, match=r"return value cannot be pickled: cannot pickle '_thread.lock'"):
        distflow.run(fails, args=("lock",))
    with pytest.raises(distflow.WorkflowEnded, match="fails-5: rank 0 ended without a return value"):
        distflow.run(fails, args=("exits",))
    with pytest.raises(InputError, match=r"(?s)cannot be pickled: .*create files, locks"):
        distflow.run(fails, args=(sys.stdout,))

    # A function of a module that the node does not have.
    sys.modules["only_here"] = module = type(sys)("only_here")
    exec("def lost():\n    pass\n", module.__dict__)
    with pytest.raises(distflow.WorkflowEnded, match=r"the function cannot be loaded with .*No module named 'only_here'"):
        distflow.run(module.lost)
    del sys.modules["only_here"]
    assert distflow.list(status="COMPLETED")[0].id == "fails-5"


def test_invalid_calls_are_refused_before_anything_starts(cli: Cli, project: Path) -> None:
    def double(number: int) -> int:
        return 2 * number

    async def later() -> None:
        pass

    run = distflow.run
    calls: dict[str, Callable[[], object]] = {
        "`nodes` must be a whole number, 1 or more, not 0": lambda: run(double, args=(1,), nodes=0),
        "`ranks` must be a whole number, 1 or more, not -1": lambda: run(double, args=(1,), ranks=-1),
        "`My Run!` is not a valid name of a workflow\nfor example `My-Run`": lambda: run(double, args=(1,), name="My Run!"),
        "cannot be called with these arguments: missing a required argument: 'number'": lambda: run(double),
        "5 is not a function": lambda: run(cast("Any", 5)),
        "returns a coroutine or a generator": lambda: run(later),
        "`functools.partial(": lambda: run(functools.partial(later)),
        "`on_interrupt` must be `cancel` or `detach`": lambda: run(double, args=(1,), on_interrupt=cast("Any", "stop")),
        "`limit` must be at least 1": lambda: next(distflow.Launcher().map_array(double, [1], limit=0)),
        "the secret `KEY` is not a string": lambda: distflow.submit(TRUE, secrets={"KEY": cast("Any", 1)}),
        "a spec must be a path, a workflow's id, YAML text, a mapping or a `Spec`, not None": lambda: distflow.submit(
            cast("Any", None)
        ),
        "a spec cannot contain <": lambda: distflow.submit({"workflow": object()}),
    }
    for message, call in calls.items():
        with pytest.raises(InputError, match=re.escape(message)):
            call()
    assert distflow.list() == []


def other_python(folder: Path) -> tuple[str, str]:
    """Return the path and the minor version of another Python: one that is installed next to this one, or a wrapper."""
    for path in sorted(Path(sys.base_prefix).parent.glob("*/bin/python3.[0-9]*")):
        if re.fullmatch(r"python3\.([89]|\d\d)", path.name) and path.name != f"python3.{sys.version_info[1]}":
            return str(path.with_name("python3")), path.name.removeprefix("python")
    folder.mkdir()
    return write_other_python(folder / "python3", (3, 8, 1)), "3.8"


@pytest.mark.ssh
def test_nodes_without_the_python_or_packages_of_a_function_are_named_before_anything_starts(
    lab: Lab, one_supervisor: None, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(number: int) -> int:
        return 2 * number

    def imports_a_package() -> object:
        import zoneinfo

        import only_elsewhere  # type: ignore[import-not-found]

        return zoneinfo, only_elsewhere

    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    other, its_version = other_python(tmp_path / "other")
    lab.configure(names=("gpu1", "gpu2"), nodes={"gpu2": {"python": other}})
    with pytest.raises(InputError, match=rf"needs Python {version}, .*: gpu2: Python {its_version}\.\d+ \(.*\)\n.*`python=`"):
        distflow.run(double, args=(1,), gpus=0)
    # Nodes that no task can use are not checked, and `python=` is the remedy.
    lab.configure(names=("gpu1", "gpu2"), nodes={"gpu2": {"python": other, "gpus": 0}})
    assert list(distflow.run(double, args=(1,), gpus=1)) == [2]
    lab.configure(names=("gpu1", "gpu2"), nodes={"gpu2": {"python": other}})
    assert list(distflow.run(double, args=(1,), gpus=0, python=sys.executable)) == [2]

    # A node that cannot be checked does not prevent the run.
    lab.configure(names=("gpu1", "gpu2"), nodes={"gpu2": {"python": "/no/such/python"}})
    assert list(distflow.run(double, args=(1,), gpus=0)) == [2]

    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "only_here.py").touch()
    monkeypatch.syspath_prepend(str(packages))
    installed = importlib.import_module("only_here")
    with pytest.raises(InputError, match=r"missing: `only_here` from .* on gpu1\ninstall the missing modules"):
        distflow.run(lambda: installed.__name__, gpus=0)
    with pytest.raises(InputError, match=r"missing: `only_elsewhere` from .* on gpu1\n"):
        distflow.run(imports_a_package, gpus=0)
    assert [one.id for one in distflow.list()] == ["double-3", "double-2", "double-1", "lasts-1"]


@pytest.mark.usefixtures("one_supervisor")
def test_an_array_of_functions_runs_a_few_at_a_time(cli: Cli, project: Path) -> None:
    def invert(number: int, sign: int) -> float:
        return sign / number

    launcher = distflow.Launcher(project=None)
    assert [one[0] for one in launcher.map_array(invert, [1, 2, 4], [1, -1, 1], limit=2)] == [1.0, -0.5, 0.25]
    values = launcher.map_array(invert, [0, 5], [1, 1], limit=1, return_exceptions=True)
    assert isinstance(next(values), ZeroDivisionError)
    assert [one.id for one in distflow.list(name="invert")] == ["invert-5", "invert-4", "invert-3", "invert-2", "invert-1"]
    last = next(values)
    assert not isinstance(last, Exception)
    assert last[0] == 0.2


def test_ctrl_c_cancels_or_detaches(cli: Cli, project: Path) -> None:
    program = (
        "import distflow, sys, time\n"
        "def sleeps():\n    print('sleeping', flush=True)\n    time.sleep(600)\n"
        "distflow.run(sleeps, on_interrupt=sys.argv[1], on_line=lambda line: print(line.text, flush=True))\n"
    )
    for way in ("cancel", "detach"):
        with subprocess.Popen([sys.executable, "-c", program, way], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"sleeping\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert b"KeyboardInterrupt" in errors
    canceled, detached = distflow.get("sleeps-1"), distflow.get("sleeps-2")
    assert canceled.wait(60).status == "FAILED_CANCELED"
    assert detached.status == "RUNNING"
    detached.cancel(force=True).wait(60)
    wait_until(lambda: detached.is_finished)
