"""Building Python environments on a node: each is built once, and a build that fails, hangs or is killed leaves none.

A script in place of uv creates the environments, which takes no seconds. `scenarios/test_venvs.py` uses pip.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, NodeUnderTest, launch_of
from distflow.backends.base import (
    AttemptKey,
    LeaseRefused,
    LeaseRequest,
    NodeUp,
    Observation,
    VenvBuilt,
    VenvFailed,
    VenvProgress,
)
from distflow.backends.machines.backend import MachinesBackend
from distflow.backends.machines.connection.transfers import build_venv_on_node
from distflow.documents.requirements import Requirements
from distflow.errors import AgentError, NodeUnreachable
from distflow.pools.model import Node, Pool
from distflow.runtime import processes
from distflow.runtime.cleanup import cleaning
from distflow.runtime.files import venvs
from distflow.runtime.services.frames import Peer
from distflow.runtime.services.venv_builder import _Build, _last_lines, _only_pip_knows_the_index
from distflow.testing.waiting import is_alive, wait_until

pytestmark = LOCAL_TRANSPORT

T = TypeVar("T", bound=Observation)

DIGEST = hashlib.sha256(b"requirements").hexdigest()
FAKE_UV = f"""#!/bin/sh
# `uv venv --no-project --python PYTHON DIRECTORY`, and then `uv pip install …`
echo "$@" >> {{calls}}
if [ "$1" = venv ]; then
  mkdir -p "$5/bin" && ln -s {sys.executable} "$5/bin/python"
else
  {{install}}
fi
"""


class Builder:
    """Builds one environment on a node, with a fake uv."""

    def __init__(self, node: NodeUnderTest, folder: Path) -> None:
        self.node = node
        self.calls = folder / "calls"
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.set_install_script("true")
        self.progress: list[str] = []

    def set_install_script(self, script: str) -> None:
        """Let ``uv pip install`` run a script."""
        uv = self._bin / "uv"
        uv.write_text(FAKE_UV.format(calls=self.calls, install=script))
        uv.chmod(0o755)

    def build(self, digest: str = DIGEST, **fields: Any) -> str:
        """Build the environment, and return the tool; empty if it already existed."""
        request = {
            "venv": digest, "file": "requirements.txt", "lines": ["torch==2.4"], "constraints": ["numpy<2"],
            "env": {"UV_DEFAULT_INDEX": "https://host/simple"},
            "path_prepend": [str(self._bin)], "shell_prelude": None, "limit_s": 60, **fields,
        }  # fmt: skip
        top, add = str(self.node.top), lambda text, _seconds: self.progress.append(text)
        return build_venv_on_node(self.node.transport, top, sys.executable, request, timeout_s=20, progress=add)[0]

    @property
    def directory(self) -> Path:
        """The only environment's directory."""
        (found,) = (path for path in (self.node.root / venvs.VENVS).iterdir() if path.is_dir())
        return found

    @property
    def is_gone(self) -> bool:
        """Whether no environment is left."""
        return not any(path.is_dir() for path in (self.node.root / venvs.VENVS).iterdir())


@pytest.fixture
def builder(node: NodeUnderTest, tmp_path: Path) -> Builder:
    """A builder for the node."""
    return Builder(node, tmp_path)


def print_and_wait_for(path: Path, marker: str) -> str:
    """A script that leaves a process, prints a line, and waits for a file."""
    return f"{leave_process(path)}; echo $$ > {path}.pid; echo installing {marker}; while [ ! -e {path} ]; do sleep 0.05; done"


def leave_process(path: Path) -> str:
    """A script that starts a process in another session."""
    return f"setsid sh -c 'echo $$ > {path}.left; exec sleep 300' & while [ ! -s {path}.left ]; do sleep 0.02; done"


def is_left_process_alive(path: Path) -> bool:
    """Whether the process of ``leave_process`` is alive."""
    return is_alive(int(Path(f"{path}.left").read_text()))


@EVERY_TRANSPORT
def test_an_environment_is_built_once_and_used_by_tasks(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = builder.node
    link = node.connect()
    with pytest.raises(AgentError, match="does not have the task's Python environment") as refused:
        node.lease(link, venv=DIGEST)
    assert refused.value.kind == "no_venv"
    assert [builder.build(), builder.build()] == ["uv", ""]
    env = builder.directory / "env"
    calls = builder.calls.read_text().splitlines()
    assert calls[0].startswith("venv --no-project --python ")
    assert calls[1:] == [f"pip install --python {env}/bin/python -r requirements.txt -c constraints.txt"]
    assert (builder.directory.stat().st_mode & 0o777, builder.directory.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    end, output = node.run(link, ["sh", "-c", "command -v python; echo $VIRTUAL_ENV"], lease={"venv": DIGEST}, venv=DIGEST)
    assert (end["exit_code"], output) == (0, f"{env}/bin/python\n{env}\n")
    # While a task runs, the environment stays.
    task = node.start(link, ["sleep", "60"], lease={"venv": DIGEST}, venv=DIGEST)
    (found,) = link.request("survey")["venvs"]
    assert (found["file"], found["in_use"]) == ("requirements.txt", True)
    with pytest.raises(AgentError, match="in use"):
        link.request("clean", venv=found["key"])
    # An agent with another interpreter, which has another environment for these packages, also reports that it is in use.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert cleaning._survey_venvs(str(node.root)) == [found]
    monkeypatch.undo()
    link.request("stop", attempt=task, grace_s=0, why="")
    node.await_end(task)
    wait_until(lambda: not link.request("survey")["venvs"][0]["in_use"], 20)
    assert link.request("clean", venv=found["key"])["freed_bytes"] > 0
    assert list((node.root / venvs.VENVS).iterdir()) == []
    attempt = node.lease(link)
    with pytest.raises(AgentError, match="may have been removed"):
        link.request("prepare", attempt=attempt, launch=launch_of(["true"], venv=DIGEST))


def test_other_packages_or_another_python_are_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {venvs.directory_of("/root", DIGEST), venvs.directory_of("/root", DIGEST[::-1])}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found.add(venvs.directory_of("/root", DIGEST))
    assert len(found) == 3


def test_a_failed_build_ends_with_the_last_lines_and_leaves_nothing(builder: Builder) -> None:
    builder.set_install_script("echo 'trying https://me:secret@host/simple'; echo 'no version of torch'; exit 3")
    with pytest.raises(AgentError) as failed:
        builder.build()
    assert failed.value.kind == "venv_failed"
    what = "cannot build the Python environment of requirements.txt: uv failed with exit code 3:"
    assert failed.value.detail.splitlines() == [what, "trying https://****@host/simple", "no version of torch"]
    assert builder.is_gone


def test_a_password_is_hidden_wherever_the_shown_lines_begin(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    for size in (1, 400, 500, 8100, 9000):
        log.write_text(f"https://me:secret@secret@host/{'x' * size}?private_token=secret&x\nthe end\n")
        lines = _last_lines(str(log))
        assert lines[-1] == "the end"
        assert "secret" not in "".join(lines)


def test_a_build_that_takes_too_long_is_stopped(builder: Builder, tmp_path: Path) -> None:
    builder.set_install_script(print_and_wait_for(tmp_path / "never", "torch"))
    with pytest.raises(AgentError, match="installing torch") as failed:
        builder.build(limit_s=1)
    assert failed.value.kind == "timeout"
    assert builder.is_gone
    assert not is_alive(int((tmp_path / "never.pid").read_text()))


def test_a_second_builder_waits_for_the_first(builder: Builder, tmp_path: Path) -> None:
    builder.set_install_script(print_and_wait_for(tmp_path / "go", "torch"))
    tools: list[str] = []
    first = threading.Thread(target=lambda: tools.append(builder.build()))
    first.start()
    wait_until((tmp_path / "go.pid").exists, 20)
    # Its time limit begins when the first has ended.
    second = threading.Thread(target=lambda: tools.append(builder.build(limit_s=-1)))
    second.start()
    wait_until(lambda: "another node or workflow is building it" in builder.progress, 20)
    (tmp_path / "go").touch()
    first.join(20)
    second.join(20)
    assert sorted(tools) == ["", "uv"]
    assert len(builder.calls.read_text().splitlines()) == 2


@pytest.mark.parametrize("is_worker", [True, False])
def test_an_environment_is_built_again_after_its_builder_was_killed(
    builder: Builder, tmp_path: Path, *, is_worker: bool
) -> None:
    builder.set_install_script(print_and_wait_for(tmp_path / "never", "torch"))
    errors: list[BaseException] = []

    def build() -> None:
        try:
            builder.build()
        except BaseException as error:  # noqa: BLE001  the test checks it
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    pid_file = tmp_path / "never.pid"
    uv = int(wait_until(lambda: pid_file.read_text() if pid_file.exists() else "", 20))
    one = processes.read_process(uv)
    assert one is not None
    worker = processes.read_process(one.ppid)
    assert worker is not None
    assert [processes.name_of(pid) for pid in (worker.pid, worker.ppid)] == ["df-venv", "df-venv"]
    os.kill(worker.pid if is_worker else worker.ppid, signal.SIGKILL)
    thread.join(20)
    assert errors
    wait_until(lambda: not is_alive(uv) and not is_left_process_alive(tmp_path / "never"), 20)
    wait_until(lambda: not is_alive(worker.pid), 20)
    assert builder.is_gone is not is_worker
    link = builder.node.connect()
    with pytest.raises(AgentError, match="does not have the task's Python environment"):
        builder.node.lease(link, venv=DIGEST)
    builder.set_install_script(leave_process(tmp_path / "end"))
    if is_worker:
        (builder.directory / "env" / "left").touch()
    assert builder.build() == "uv"
    assert not (builder.directory / "env" / "left").exists()
    assert not is_left_process_alive(tmp_path / "end")
    builder.set_install_script("true")
    # A builder that was killed while it marked the directory.
    shutil.rmtree(builder.directory / "env")
    for path in builder.directory.iterdir():
        path.unlink()
    (builder.directory / ".distflow.123").touch()
    assert builder.build() == "uv"


def test_packages_are_synced_before_their_environment_is_marked_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"venv": DIGEST, "file": "r", "lines": ["torch"], "constraints": [], "limit_s": 60}
    build = _Build(str(tmp_path), Peer(0, -1), 0o077, request)
    monkeypatch.setattr(build, "_commands", lambda: ("uv", []))
    synced: list[str] = []
    monkeypatch.setattr(processes, "sync_file_system", lambda directory: synced.extend(os.listdir(directory)))
    (tmp_path / venvs.VENVS).mkdir()
    build._build()
    assert "requirements.txt" in synced
    assert venvs.COMPLETE not in synced
    assert venvs.COMPLETE in os.listdir(venvs.directory_of(str(tmp_path), DIGEST))


@EVERY_TRANSPORT
def test_a_build_ends_with_its_connection(builder: Builder, tmp_path: Path) -> None:
    builder.set_install_script(print_and_wait_for(tmp_path / "never", "torch"))

    class Canceled(Exception):
        pass

    def cancel(text: str, _seconds: float) -> None:
        raise Canceled(text)

    request = {"venv": DIGEST, "file": "r", "lines": ["torch"], "constraints": [], "env": {"UV_INDEX": "x"}, "limit_s": 60}
    request["path_prepend"] = [str(tmp_path / "bin")]
    with pytest.raises(Canceled):
        build_venv_on_node(
            builder.node.transport, str(builder.node.top), sys.executable, request, timeout_s=20, progress=cancel
        )
    wait_until(lambda: builder.is_gone, 20)


def test_the_backend_reports_a_build_and_cancels_one(
    node: NodeUnderTest, builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.backends.machines.backend._REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr("distflow.backends.machines.backend.transport_of", lambda *_: node.transport)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "UV_DEFAULT_INDEX": "https://host/simple"}
    one = Node(name="n", host="n", root=str(node.top), python=sys.executable, environment=environment)
    observations: list[Observation] = []
    (tmp_path / "blobs").mkdir()
    pool = Pool(name="p", backend="ssh", nodes=(one,))
    backend = MachinesBackend(
        pool, blobs=tmp_path / "blobs", sink=observations.append, logs=SimpleNamespace(has_room=lambda: True)
    )
    key = AttemptKey(workflow=node.workflow, group="g", task="t", attempt=0, node="n")
    venv = Requirements(file="requirements.txt", lines=("torch",))

    def await_one(kind: type[T]) -> T:
        def find() -> T | None:
            return next((one for one in observations if isinstance(one, kind)), None)

        return wait_until(find, 20, kind.__name__)

    try:
        backend.connect([one])
        await_one(NodeUp)
        builder.set_install_script(print_and_wait_for(tmp_path / "never", "\x1b[1mtorch"))
        backend.build_venv(key, venv)
        wait_until(lambda: any(isinstance(one, VenvProgress) and one.message == "installing torch" for one in observations), 20)
        backend.cancel_venv(key)
        wait_until(lambda: builder.is_gone, 20)
        builder.set_install_script("exit 1")
        backend.build_venv(key, venv)
        failed = await_one(VenvFailed)
        assert failed.is_final
        assert failed.message.startswith("n: cannot build the Python environment of requirements.txt: uv failed with")
        builder.set_install_script("true")
        backend.build_venv(key, venv)
        built = await_one(VenvBuilt)
        assert built.tool == "uv"
        lease = LeaseRequest(
            workflow=node.workflow, group="g", attempt=0, nodes={"t": "n"}, gpus={"t": 0}, master="t", venvs={"t": DIGEST}
        )
        backend.lease(lease)
        refused = await_one(LeaseRefused)
        assert (refused.without_venv, refused.nodes, refused.is_final) == ({"t": "n"}, {}, False)
    finally:
        backend.close()


def test_a_canceled_build_ends_while_its_node_hangs_and_a_waiting_one_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.backends.machines.backend._BUILD_THREADS", 1)
    observations: list[Observation] = []
    logs = SimpleNamespace(has_room=lambda: True)
    backend = MachinesBackend(Pool(name="p", backend="ssh", nodes=()), blobs=tmp_path, sink=observations.append, logs=logs)
    calls: list[Requirements] = []
    is_closed = threading.Event()

    def build(venv: Requirements, _progress: object, opened: Callable[[Callable[[], None]], None]) -> tuple[str, float]:
        calls.append(venv)
        opened(is_closed.set)
        assert is_closed.wait(20)
        raise NodeUnreachable("n", "the connection ended")

    backend._connections["n"] = SimpleNamespace(build_venv=build, close=lambda: None)  # type: ignore[assignment]
    first, second = (AttemptKey(workflow="1" * 32, group="g", task=task, attempt=0, node="n") for task in ("a", "b"))
    backend.build_venv(first, Requirements(file="r", lines=("torch",)))
    backend.build_venv(second, Requirements(file="r", lines=("torch",)))
    wait_until(lambda: calls, 20)
    backend.cancel_venv(second)
    backend.cancel_venv(first)
    assert is_closed.wait(60)
    backend._building.shutdown(wait=True)
    backend.close()
    assert (len(calls), observations) == (1, [])


def test_an_environment_directory_without_a_marker_is_not_removed(builder: Builder) -> None:
    assert builder.build() == "uv"
    directory = builder.directory
    (directory / ".distflow").unlink()
    with pytest.raises(AgentError, match="does not belong to distflow"):
        builder.build()
    assert (directory / "env").exists()
    link = builder.node.connect()
    assert link.request("survey")["venvs"] == []


@pytest.mark.parametrize(
    ("variables", "configuration", "uses_pip"),
    [
        ({}, "", False),
        ({"PIP_NO_INDEX": "1"}, "", True),
        ({"PIP_NO_INDEX": "1", "UV_INDEX_URL": "https://host/simple"}, "", False),
        ({}, "[global]\ntimeout = 60\n", False),
        ({}, "[global]\nindex-url = https://host/simple\n", True),
    ],
)
def test_pip_is_used_where_only_pip_knows_the_index(
    tmp_path: Path, variables: dict[str, str], configuration: str, uses_pip: bool
) -> None:
    path = tmp_path / "pip.conf"
    path.write_text(configuration)
    assert _only_pip_knows_the_index(variables, [str(path)]) is uses_pip


@pytest.mark.parametrize("fields", [{"digest": "../x"}, {"limit_s": "x"}, {"env": 3}])
def test_a_malformed_request_is_refused(builder: Builder, fields: dict[str, Any]) -> None:
    with pytest.raises(AgentError) as refused:
        builder.build(**fields)
    assert refused.value.kind == "bad_request"
