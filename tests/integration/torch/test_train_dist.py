"""``workflow_specs/train_dist.py`` as users run it: real processes with gloo on 127.0.0.1, some of which are killed.

Each test waits for output of the processes or for their end, with a deadline.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from distflow.testing.daemons import free_port
from preloaded import Preloaded, start_preloaded

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[3] / "workflow_specs" / "train_dist.py"
TORCHRUN = ("-m", "torch.distributed.run")
DEADLINE_S = 240.0
"""The limit for one run on a busy machine."""
THREE_EPOCHS = ("--epochs", "3", "--lr", "0.01")
"""Flags of a short run. With this learning rate, its model recognizes 98 % of the digits."""
FOREVER = "100000"
"""Epochs of a run that a test ends."""
PARENT_HELPER_AND_TWO_RANKS = 4
"""Processes of one invocation with two ranks; the helper is multiprocessing's resource tracker."""


class Run:
    """One started command. Its output goes to files, so that it never waits for a reader."""

    process: subprocess.Popen[bytes] | Preloaded

    def __init__(
        self, launcher: list[str], flags: tuple[str, ...], folder: Path, environment: dict[str, str],
        temporary: pytest.TempPathFactory,
    ) -> None:  # fmt: skip
        """Start the command in ``folder`` with only the necessary part of this process's environment."""
        self.folder = folder
        self.output = folder / "output"
        self.error_file = folder / "error.json"
        folder.mkdir()
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        arguments = [str(SCRIPT), "--output", str(self.output), *flags]
        variables = {**inherited, "TORCHELASTIC_ERROR_FILE": str(self.error_file), **environment}
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            if sys.executable not in launcher:
                with open(os.devnull) as stdin:
                    files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
                    self.process = start_preloaded(temporary.getbasetemp(), [*launcher, *arguments], folder, variables, *files)
                return
            self.process = subprocess.Popen(
                [*launcher, *arguments],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines printed so far."""
        text = (self.folder / "stdout").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def stderr(self) -> str:
        """The standard error so far."""
        return (self.folder / "stderr").read_text()

    @property
    def pids(self) -> dict[int, int]:
        """Rank to process id, of the ranks that have started."""
        return {record["rank"]: record["pid"] for record in self.records if record.get("event") == "started"}

    @property
    def epochs(self) -> list[int]:
        """The completed epochs."""
        return [record["epoch"] for record in self.records if "loss" in record]

    @property
    def error(self) -> dict[str, Any]:
        """The error file."""
        content = json.loads(self.error_file.read_text())
        assert isinstance(content, dict)
        return content

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(DEADLINE_S)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition is true. Fail if the command ends before."""
        assert is_true_in_time(lambda: condition() or self.process.poll() is not None), self.stderr
        assert condition(), self.stderr


class Start(Protocol):
    """Starts the script with these flags, directly or by a launcher. ``environment`` adds variables.

    The process has already imported torch, unless the launcher is ``sys.executable``.
    """

    def __call__(self, *flags: str, launcher: tuple[str, ...] = (), **environment: str) -> Run:
        """Return the started run."""


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start commands on one free port, and end all their processes afterwards."""
    runs: list[Run] = []
    port = str(free_port(""))

    def start_one(*flags: str, launcher: tuple[str, ...] = (), **environment: str) -> Run:
        command = [*launcher, "--master_port", port] if launcher[:2] == TORCHRUN else [*launcher]
        runs.append(Run(command, flags, tmp_path / f"run-{len(runs)}", {"MASTER_PORT": port, **environment}, tmp_path_factory))
        return runs[-1]

    yield start_one
    for run in runs:
        run.process.terminate()
    for run in runs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(DEADLINE_S)


def is_true_in_time(condition: Callable[[], object]) -> bool:
    """Return whether the condition became true before the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.05)
    return True


def session_members(session: int) -> list[int]:
    """Return the live processes of a session, from /proc."""
    members = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, sid = (path / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == session and state != "Z":
            members.append(int(path.name))
    return members


def assert_no_process_remains(run: Run) -> None:
    """Check that no process of an ended run remains. The helper process of multiprocessing ends a moment later."""
    assert is_true_in_time(lambda: not session_members(run.process.pid))


def assert_trained(run: Run, *, epochs: int, world_size: int) -> None:
    """Check the lines that rank 0 prints, and the model that it writes."""
    assert run.epochs == list(range(1, epochs + 1))
    final = run.records[-1]
    assert (final["event"], final["epoch"], final["world_size"]) == ("finished", epochs, world_size)
    assert final["accuracy"] > 0.95
    assert [path.name for path in run.output.iterdir()] == ["model.pt"]


def test_two_invocations_form_one_world(start: Start) -> None:
    """As in the tutorial, each machine has one command, and the ranks of the worker begin at its offset."""
    options = ("--size", "1", "--world_size", "2", *THREE_EPOCHS)
    worker = start("--offset", "1", *options)
    master = start("--offset", "0", *options)

    assert (master.wait(), worker.wait()) == (0, 0)
    assert (list(master.pids), list(worker.pids)) == ([0], [1])
    assert_trained(master, epochs=3, world_size=2)
    assert len(worker.records) == 1, "only rank 0 prints metrics"
    assert not worker.output.exists(), "only rank 0 writes the model"
    assert (master.stderr, worker.stderr) == ("", ""), "there are no warnings"


def test_one_invocation_starts_size_processes(start: Start) -> None:
    """A machine with several ranks has a process for each. Without flags, variables of distflow define the ranks."""
    run = start(*THREE_EPOCHS, DISTFLOW_RANK_OFFSET="0", DISTFLOW_RANK_SIZE="2", DISTFLOW_WORLD_SIZE="2")

    assert run.wait() == 0, run.stderr
    started = [record for record in run.records if record.get("event") == "started"]
    assert sorted((record["rank"], record["local_rank"]) for record in started) == [(0, 0), (1, 1)]
    assert len({record["pid"] for record in started} - {run.process.pid}) == 2
    assert_trained(run, epochs=3, world_size=2)
    assert not run.error_file.exists()


def test_torchrun_starts_the_same_script(start: Start) -> None:
    """Under torchrun, each process is a rank, and does not start other ranks."""
    run = start(*THREE_EPOCHS, launcher=(*TORCHRUN, "--nnodes", "1", "--nproc_per_node", "2"))

    assert run.wait() == 0, run.stderr
    assert sorted(run.pids) == [0, 1]
    assert_trained(run, epochs=3, world_size=2)


def test_a_killed_rank_is_named_and_its_siblings_stop(start: Start) -> None:
    """The error names the killed rank, not the rank that then lost its connection."""
    run = start("--size", "2", "--world_size", "2", "--epochs", FOREVER)
    run.wait_until(lambda: run.epochs)
    os.kill(run.pids[1], signal.SIGKILL)

    assert run.wait() == 1
    assert not {*run.pids.values()} & {*session_members(run.process.pid)}, "the siblings ended before their parent"
    assert_no_process_remains(run)
    assert "rank 1 was killed by SIGKILL" in run.stderr
    assert (run.error["rank"], run.error["signal"]) == (1, "SIGKILL")
    assert run.error["pid"] == run.pids[1]
    assert run.error["message"]["message"] == "rank 1 was killed by SIGKILL"
    assert not (run.output / "model.pt").exists()


def test_an_exception_in_a_rank_is_reported_with_its_traceback(start: Start, tmp_path: Path) -> None:
    """Rank 0 cannot write its output. The error file has this error in torch's format, not the later error of rank 1."""
    blocked = tmp_path / "file" / "output"
    blocked.parent.touch()
    run = start("--size", "2", "--world_size", "2", "--epochs", FOREVER, "--output", str(blocked))

    assert run.wait() == 1
    assert not {*run.pids.values()} & {*session_members(run.process.pid)}, "the siblings ended before their parent"
    assert_no_process_remains(run)
    assert "rank 0 failed:" in run.stderr
    assert "NotADirectoryError" in run.stderr
    assert run.error["rank"] == 0
    message = run.error["message"]
    assert message["message"].startswith("NotADirectoryError: ")
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")
    assert int(message["extraInfo"]["timestamp"]) > 1_700_000_000


def test_ranks_end_with_the_process_that_started_them(start: Start) -> None:
    """No rank remains after SIGKILL of the parent, not even a rank that is still importing torch."""
    run = start("--size", "2", "--world_size", "2", "--epochs", FOREVER, launcher=(sys.executable,))
    run.wait_until(lambda: len(session_members(run.process.pid)) >= PARENT_HELPER_AND_TWO_RANKS)
    run.process.kill()

    assert run.wait() == -signal.SIGKILL
    assert_no_process_remains(run)


def test_a_stopped_run_writes_a_checkpoint_that_the_next_run_resumes(start: Start, tmp_path: Path) -> None:
    """SIGTERM on one machine stops all ranks after the same step. Only rank 0 writes, and the unfinished epoch is repeated."""
    here, elsewhere = tmp_path / "here" / "checkpoint.pt", tmp_path / "elsewhere" / "checkpoint.pt"

    def start_both(epochs: str) -> tuple[Run, Run]:
        options = ("--size", "1", "--world_size", "2", "--epochs", epochs, "--checkpoint")
        return start("--offset", "0", *options, str(here)), start("--offset", "1", *options, str(elsewhere))

    master, worker = start_both(FOREVER)
    master.wait_until(lambda: master.epochs)
    worker.process.terminate()
    assert (master.wait(), worker.wait()) == (128 + signal.SIGTERM, 128 + signal.SIGTERM)
    assert not master.error_file.exists(), "a requested stop is not a failure"
    assert not worker.error_file.exists()
    done = master.epochs[-1]

    master, worker = start_both(str(done + 2))
    assert (master.wait(), worker.wait()) == (0, 0), master.stderr + worker.stderr
    assert master.epochs == [done + 1, done + 2]
    assert not elsewhere.parent.exists()


def test_ranks_that_wait_for_a_peer_can_be_stopped(start: Start) -> None:
    """They wait in C++ code, where no Python signal handler runs."""
    run = start("--size", "2", "--world_size", "3")
    run.wait_until(lambda: len(run.pids) == 2)
    begin = time.monotonic()
    run.process.terminate()

    assert run.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 60, "the ranks end before the timeout of torch"
    assert_no_process_remains(run)


def test_sigterm_before_the_first_rank_starts_stops_the_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from multiprocessing.context import SpawnProcess\n"
        "start = SpawnProcess.start\n"
        "def start_after_sigterm(process):\n"
        "    SpawnProcess.start = start\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    start(process)\n"
        "SpawnProcess.start = start_after_sigterm\n"
    )
    run = start("--size", "2", "--world_size", "2", "--epochs", FOREVER, launcher=(sys.executable,), PYTHONPATH=str(tmp_path))
    assert is_true_in_time(lambda: run.process.poll() is not None or run.epochs)
    assert not run.epochs, "it trains although it was asked to stop"
    assert run.wait() == 128 + signal.SIGTERM, run.stderr
    assert_no_process_remains(run)


def test_mnist_files_are_read_and_a_resumed_run_ends_like_an_uninterrupted_one(start: Start, tmp_path: Path) -> None:
    """The idx files are plain or gzipped. Two epochs and then two more result in the same model as four."""
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint.pt"
    write_mnist(data)
    options = ("--data-dir", str(data), "--batch_size", "16")
    whole = start(*options, "--epochs", "4")
    assert whole.wait() == 0, whole.stderr
    assert_trained(whole, epochs=4, world_size=1)

    first = start(*options, "--epochs", "2", "--checkpoint", str(checkpoint))
    assert first.wait() == 0, first.stderr
    second = start(*options, "--epochs", "4", "--checkpoint", str(checkpoint))
    assert second.wait() == 0, second.stderr
    assert second.epochs == [3, 4]
    assert second.records[-2] == whole.records[-2], "same step, loss and accuracy"
    assert (second.output / "model.pt").read_bytes() == (whole.output / "model.pt").read_bytes()


def write_mnist(folder: Path) -> None:
    """Write small files in MNIST's format: images of noise with a bright bar whose height tells the digit."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for part, count in (("train", 320), ("t10k", 60)):
        labels = generator.integers(0, 10, count).astype(np.uint8)
        images = generator.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 7, 4:24] = 255
        header = b"\0\0\x08\x03" + np.array(images.shape, ">u4").tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + np.array(labels.shape, ">u4").tobytes() + labels.tobytes()
        )


def test_ranks_that_do_not_fit_the_world_are_refused(start: Start) -> None:
    """The command fails before it starts a rank, with the exit code for wrong arguments."""
    run = start("--offset", "16", "--size", "8", "--world_size", "16")

    assert run.wait() == 2
    assert "ranks 16 to 23 do not fit a world of 16" in run.stderr
    assert run.records == []
