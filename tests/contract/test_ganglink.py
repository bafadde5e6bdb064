"""The gang link: a failed task stops its peers without an agent or a supervisor. Nothing else stops them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import LOCAL_TRANSPORT
from contract.test_runtime_faults import is_dead
from distflow.runtime.hashing import keyed_hash
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

TOKEN = "t0ken"
HUB = "127.0.0.1"
RUN_UNTIL_SIGTERM = ["sh", "-c", 'trap "exit 0" TERM; echo ready; while :; do sleep 0.2; done']
"""A command that exits with code 0 on SIGTERM."""


def exit_after(go: Path, code: int) -> list[str]:
    """A command that exits with a code as soon as the file ``go`` exists."""
    return ["sh", "-c", f'while [ ! -e "{go}" ]; do sleep 0.2; done; exit {code}']


NUMBER = b"0" * 32 + b"\n"
FALSE_REPORT = b'{"failed": {"task": "two", "why": "a lie"}}\n'
MALFORMED_MESSAGES = {
    "no greeting": b"\xff" * 100_000,
    "an old greeting": b'{"number": "00000000000000000000000000000000"}\n',
    "a deeply nested greeting": b"[" * 8000 + b"\n",
    "empty lines": b"\n\n\n",
    "no code": NUMBER + FALSE_REPORT,
    "another code": NUMBER + b"0" * 64 + b" " + FALSE_REPORT,
    "a deeply nested message": NUMBER + b"0" * 64 + b" " + b'{"a":' * 1500 + b"\n",
    # At one of these depths, json.loads succeeds and json.dumps raises RecursionError: that ended the hub.
    **{
        f"a message of the old form, nested {depth} times": b'{"number": "0"}\n{"mac": "", "said": '
        + b"[" * depth + b"]" * depth + b"}\n"
        for depth in range(940, 1000)
    },
    "a line without an end": NUMBER + b"0" * 100_000,
    "a number that is not finite": NUMBER + b"0" * 64 + b' {"task": 1e999}\n',
}  # fmt: skip
"""Messages that a host without the token may send."""


def send_to_hub(port: int, data: bytes) -> bytes:
    """Send ``data`` to the hub, wait until the hub closes the connection, and return its answer."""
    with socket.create_connection((HUB, port)) as raw:
        answer = b""
        with contextlib.suppress(OSError):
            raw.sendall(data)
        raw.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while more := raw.recv(4096):
                answer += more
        return answer


class Gang:
    """A gang on one node; the first task is the hub."""

    def __init__(self, node: NodeUnderTest) -> None:
        self.node = node
        self.link = node.connect()
        self.names: dict[str, str] = {}
        self.hub = node.attempt()
        answer = self.link.request(
            "lease", attempt=self.hub, link=HUB, gpus=0, gpu_ids=[], lease_dir="", port=None, start_timeout_s=60
        )
        self.port: int = answer["link_port"]

    def start(self, commands: dict[str, list[str]], port: int | None = None, **changed: dict[str, Any]) -> None:
        """Start a command for each task. Tasks connect to the hub at ``port``. ``changed`` has settings of single tasks."""
        for task, argv in commands.items():
            is_hub = not self.names
            others = [name for name in commands if name != task] if is_hub else [next(iter(commands))]
            hub_address = {"address": None, "port": None} if is_hub else {"address": HUB, "port": port or self.port}
            gang = {"task": task, "others": others, **hub_address, "counts": True, "success": [], "failure": []}
            name = self.hub if is_hub else self.node.lease(self.link)
            self.names[task] = name
            launch: dict[str, Any] = {
                "argv": argv,
                "env": {},
                "secret_env": {},
                "path_prepend": [],
                "files": [],
                "shell_prelude": None,
            }
            settings = {**gang, "token": TOKEN, "grace_s": 5, **changed.get(task, {})}
            self.link.request("prepare", attempt=name, launch=launch | {"cwd": "work", "stop_grace_s": 5, "gang": settings})
        for name in self.names.values():
            self.link.request("start", attempt=name)
        for task, argv in commands.items():
            if "echo ready" in argv[2]:
                wait_until(lambda task=task: "ready" in self.node.output(self.names[task]), 20, task)  # type: ignore[misc]

    def await_end(self, task: str) -> dict[str, Any]:
        """Wait for the end of a task, and return it. It is read from files, because no agent may be connected."""
        return wait_until(lambda: self.node.record(self.names[task]), 20, f"the end of {task}")


@pytest.fixture
def gang(node: NodeUnderTest) -> Gang:
    return Gang(node)


@pytest.mark.parametrize("first", ["master", "one"])
def test_a_failing_task_stops_the_others_without_agent_and_supervisor(gang: Gang, tmp_path: Path, first: str) -> None:
    commands = {
        task: exit_after(tmp_path / "go", 3) if task == first else RUN_UNTIL_SIGTERM for task in ("master", "one", "two")
    }
    gang.start(commands)
    gang.link.close()
    (tmp_path / "go").touch()
    assert (gang.await_end(first)["reason"], gang.await_end(first)["exit_code"]) == ("exited", 3)
    for task in {"master", "one", "two"} - {first}:
        end = gang.await_end(task)
        assert (end["reason"], end["why"], end["exit_code"]) == ("peer_failed", "PEER_FAILED", 0)
        assert end["message"] == f"stopped because {first} failed (exit code 3)"


def test_peers_of_a_failed_task_are_killed_after_their_grace_period(gang: Gang, tmp_path: Path) -> None:
    ignoring_sigterm = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done"]
    killed = ["sh", "-c", f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.2; done; kill -KILL $$']
    gang.start({"master": ignoring_sigterm, "one": killed}, master={"grace_s": 0.2})
    (tmp_path / "go").touch()
    assert gang.await_end("master")["signal"] == 9
    assert gang.await_end("master")["message"] == "stopped because one failed (signal 9)"


def test_keepers_exit_as_soon_as_all_have_received_the_failure(gang: Gang, tmp_path: Path) -> None:
    slow = ["sh", "-c", 'trap "sleep 1; exit 0" TERM; echo ready; while :; do sleep 0.2; done']
    gang.start({"master": slow, "one": exit_after(tmp_path / "go", 3), "two": RUN_UNTIL_SIGTERM})
    keepers = [gang.node.state(name)["keeper"]["pid"] for name in gang.names.values()]
    (tmp_path / "go").touch()
    # A keeper that cannot reach another one would wait for longer.
    wait_until(lambda: all(is_dead(pid) for pid in keepers), 12, "all keepers are gone")


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        (0, {}),
        (3, {"counts": False}),
        (3, {"success": [[1, 5]]}),
    ],
    ids=["success", "a failure that does not count", "a code that is a success"],
)
def test_an_end_that_is_not_a_failure_stops_no_other_task(
    gang: Gang, tmp_path: Path, code: int, settings: dict[str, Any]
) -> None:
    gang.start(
        {"master": RUN_UNTIL_SIGTERM, "one": exit_after(tmp_path / "go", code), "two": exit_after(tmp_path / "then", 1)},
        one=settings,
    )
    (tmp_path / "go").touch()
    assert gang.await_end("one")["exit_code"] == code
    # Messages arrive in order: if the first end had been reported as a failure, the message would name it.
    (tmp_path / "then").touch()
    assert gang.await_end("master")["message"] == "stopped because two failed (exit code 1)"


def test_an_exit_code_of_zero_that_counts_as_a_failure_stops_the_gang(gang: Gang, tmp_path: Path) -> None:
    gang.start({"master": RUN_UNTIL_SIGTERM, "one": exit_after(tmp_path / "go", 0)}, one={"failure": [[0, 0]]})
    (tmp_path / "go").touch()
    assert gang.await_end("master")["message"] == "stopped because one failed (exit code 0)"


def test_a_client_without_the_token_can_neither_send_nor_receive(gang: Gang, tmp_path: Path) -> None:
    gang.start(
        {"master": RUN_UNTIL_SIGTERM, "stranger": exit_after(tmp_path / "go", 3), "two": exit_after(tmp_path / "then", 1)},
        stranger={"token": "another"},
    )
    for message in MALFORMED_MESSAGES.values():
        assert b"failed" not in send_to_hub(gang.port, message)
    (tmp_path / "go").touch()
    assert gang.await_end("stranger")["exit_code"] == 3
    (tmp_path / "then").touch()
    assert gang.await_end("master")["message"] == "stopped because two failed (exit code 1)"


class CuttableProxy:
    """A proxy to the hub whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self.is_cut = False
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self.is_cut = True
        for one in self.connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        for one in [self._listener, *self.connections]:
            one.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._port))
                self.connections += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(data)


def test_a_broken_link_ends_no_task_and_reconnects(gang: Gang, tmp_path: Path) -> None:
    proxy = CuttableProxy(gang.port)
    try:
        gang.start({"master": RUN_UNTIL_SIGTERM, "one": exit_after(tmp_path / "go", 3)}, port=proxy.port)
        wait_until(lambda: proxy.connections, 20)
        proxy.cut()
        (tmp_path / "go").touch()
        assert gang.await_end("one")["exit_code"] == 3
        # The ended task cannot report its failure, and the other one continues.
        assert gang.node.record(gang.names["master"]) is None
        proxy.is_cut = False
        assert gang.await_end("master")["message"] == "stopped because one failed (exit code 3)"
    finally:
        proxy.close()


def test_the_token_of_the_link_is_in_no_file_and_no_environment(gang: Gang, tmp_path: Path) -> None:
    gang.start(
        {"master": ["sh", "-c", f'env; while [ ! -e "{tmp_path}/go" ]; do sleep 0.2; done; exit 1'], "one": RUN_UNTIL_SIGTERM}
    )
    (tmp_path / "go").touch()
    gang.await_end("one")
    for path in gang.node.root.rglob("*"):
        if path.is_file():
            assert TOKEN not in path.read_bytes().decode(errors="replace"), path


def test_malformed_messages_with_a_valid_token_do_no_harm(gang: Gang, tmp_path: Path) -> None:
    gang.start({"master": RUN_UNTIL_SIGTERM, "one": exit_after(tmp_path / "go", 3)})
    for message in (b"[" * 2000, b'{"failed": 1}', b'{"failed": {"task": [], "why": 1e400}}', b"{}"):
        with socket.create_connection((HUB, gang.port)) as raw:
            own_number, lines = os.urandom(16).hex().encode(), raw.makefile("rb")
            raw.sendall(own_number + b"\n")
            numbers = lines.readline().strip() + own_number
            for text in (b'{"task": "one"}', message):
                code = keyed_hash(TOKEN.encode(), b"task " + numbers + text)
                raw.sendall(code + b" " + text + b"\n")
            raw.settimeout(10)
            assert b"welcome" in lines.readline(), message
    (tmp_path / "go").touch()
    assert gang.await_end("master")["message"] == "stopped because one failed (exit code 3)"


def test_many_foreign_connections_do_not_keep_the_gang_from_the_hub(gang: Gang, tmp_path: Path) -> None:
    with contextlib.ExitStack() as flood:
        gang.start({"master": RUN_UNTIL_SIGTERM}, master={"others": ["one"]})
        for _ in range(100):
            flood.enter_context(socket.create_connection((HUB, gang.port)))
        gang.start({"one": exit_after(tmp_path / "go", 3)}, one={"others": ["master"]})
        (tmp_path / "go").touch()
        assert gang.await_end("master")["message"] == "stopped because one failed (exit code 3)"


def test_the_hub_listens_on_the_training_address_only(gang: Gang) -> None:
    socket.create_connection((HUB, gang.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", gang.port)).close()
