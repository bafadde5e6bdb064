"""The hub that runs many commands over one channel, on this machine: faults, hostile data and leftovers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from contract.conftest import processes_with
from distflow.backends.allocated.ray.endpoint import EndpointTransport
from distflow.backends.allocated.ray.states import Endpoint
from distflow.errors import BootstrapFailed, NodeUnreachable
from distflow.runtime.services import command_hub
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.base import REASON_MARK
from distflow.transports.local import LocalChannel, LocalTransport
from distflow.transports.multiplexed import MultiplexedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class ReplacedHub(LocalTransport):
    """A transport to this machine that starts another program than the hub. ``HUB`` in its text is the hub's program."""

    def __init__(self, text: str) -> None:
        super().__init__("login")
        self._text = text

    def open(self, argv: Sequence[str]) -> LocalChannel:
        source, *arguments = argv[-3:]
        return super().open([sys.executable, "-c", self._text.replace("HUB", source), *arguments])


@pytest.fixture
def make() -> Iterator[Callable[..., MultiplexedTransport]]:
    """Make transports to this machine, and check that they leave no threads."""
    made: list[MultiplexedTransport] = []

    def one(inner: LocalTransport | None = None, **options: object) -> MultiplexedTransport:
        given: dict[str, object] = {"python": sys.executable, **options}
        made.append(MultiplexedTransport(inner or LocalTransport("login"), **given))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for transport in made:
        transport.close()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.endswith(" of login")], what="its threads ended")


@pytest.mark.parametrize("greeting", [b"", b"nonce\n"], ids=["at once", "after its greeting"])
def test_a_node_that_closes_the_connection_before_its_hub_starts_is_unreachable(greeting: bytes) -> None:
    """The error is not attributed to Python, because the node may be starting or ending."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint(address="127.0.0.1", port=server.getsockname()[1], token="00")

        def refuse() -> None:
            connection = server.accept()[0]
            with connection:
                connection.sendall(greeting)
                if greeting:
                    connection.recv(65536)

        thread = threading.Thread(target=refuse)
        thread.start()
        inner = EndpointTransport("n1", LocalTransport("login"), lambda: endpoint, sys.executable)
        transport = MultiplexedTransport(inner)
        with pytest.raises(NodeUnreachable, match="the connection broke"):
            transport.run(["true"], timeout_s=60)
        transport.close()
        thread.join()


def test_an_error_about_an_allocated_node_does_not_name_the_login_node() -> None:
    def find() -> Endpoint:
        raise NodeUnreachable("n1", "Ray reports no ready actor of placement group 1 on this node")

    with pytest.raises(NodeUnreachable) as caught:
        EndpointTransport("n1", LocalTransport("login"), find, sys.executable).open(["python3"])
    assert caught.value.message == "n1: Ray reports no ready actor of placement group 1 on this node"


def hub_of(transport: MultiplexedTransport) -> int:
    """The process id of the hub, which is the parent of every command."""
    return int(transport.run(["sh", "-c", "echo $PPID"], timeout_s=60).stdout)


def test_a_blocked_channel_does_not_block_other_commands(make: Callable[..., MultiplexedTransport], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    transport = make()
    unread = transport.open(["cat", "/dev/zero"])
    blocked = transport.open(["sh", "-c", f"read word < {tmp_path}/fifo"])

    def write() -> None:
        with pytest.raises(NodeUnreachable, match="the connection to the command is closed"):
            blocked.write(b"x" * 50_000_000)

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: len(unread._output) == command_hub.WINDOW and blocked._credit == 0, what="both windows are full")
    data = os.urandom(5_000_000)
    assert transport.run(["cat"], input=data, timeout_s=30).stdout == data
    assert len(unread._output) == command_hub.WINDOW
    assert len(unread.read()) == 65536
    blocked.close()
    (tmp_path / "fifo").write_text("enough\n")
    writer.join(60)
    assert not writer.is_alive()


@pytest.fixture
def held_fifo(tmp_path: Path) -> Iterator[int]:
    """The open FIFO ``fifo`` in ``tmp_path``. Several readers can use it, because it always has a writer."""
    os.mkfifo(tmp_path / "fifo")
    held = os.open(tmp_path / "fifo", os.O_RDWR)
    yield held
    os.close(held)


def test_a_hub_buffers_a_limited_amount_of_unread_output(
    make: Callable[..., MultiplexedTransport], tmp_path: Path, held_fifo: int
) -> None:
    transport = make()
    hub = hub_of(transport)
    channels = [transport.open(["sh", "-c", f"read word < {tmp_path}/fifo; exec cat /dev/zero"]) for _ in range(40)]
    connection = transport._shared.current
    assert connection is not None

    children = Path(f"/proc/{hub}/task/{hub}/children")

    def all_are_sleeping() -> bool:
        processes = [*children.read_text().split(), hub]
        return all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S" for pid in processes)

    wait_until(lambda: len(children.read_text().split()) == len(channels), what="all commands run")
    with connection.lock:  # so that the submitter takes no output
        os.write(held_fifo, b"go\n" * len(channels))
        wait_until(lambda: all(all_are_sleeping() for _ in range(20)), what="all commands wait")
    status = Path(f"/proc/{hub}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 40_000  # KiB; all windows together are 80 MiB


def test_a_hub_runs_more_commands_than_a_low_limit_of_open_files_allows(make: Callable[..., MultiplexedTransport]) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    transport = make(ReplacedHub(f"{limit}; exec(r'''HUB''')"))
    channels = [transport.open(["sh", "-c", "ulimit -n; cat"]) for _ in range(50)]
    assert {channel.read() for channel in channels} == {b"100\n"}


def test_a_killed_hub_ends_its_channels_but_no_command(
    make: Callable[..., MultiplexedTransport], marker: str, tmp_path: Path, held_fifo: int
) -> None:
    transport = make()
    hub = hub_of(transport)
    channel = transport.open(["sh", "-c", f"echo up; read word < {tmp_path}/fifo", marker])
    assert channel.read() == b"up\n"
    errors: list[str] = []

    def run() -> None:
        with pytest.raises(NodeUnreachable, match="the connection broke while `sh` ran") as raised:
            transport.run(["sh", "-c", f"read word < {tmp_path}/fifo", marker], timeout_s=60)
        errors.append(str(raised.value))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(Path(f"/proc/{hub}/task/{hub}/children").read_text().split()) == 2, what="both commands run")
    os.kill(hub, signal.SIGKILL)
    assert channel.read() == b""
    thread.join(60)
    assert len(errors) == 1
    assert "exit code 137" in errors[0]
    assert channel.exit_code is None
    assert REASON_MARK in channel.stderr_tail()
    with pytest.raises(NodeUnreachable):
        channel.write(b"x")
    assert processes_with(marker)
    assert hub_of(transport) != hub
    assert not Path(f"/proc/{hub}").exists()
    os.write(held_fifo, b"enough\n" * 2)
    wait_until(lambda: not processes_with(marker), what="the commands ended by themselves")


def test_a_hub_without_heartbeats_is_unreachable(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make(ping_s=0.1)
    hub = hub_of(transport)
    channel = transport.open(["cat"])
    os.kill(hub, signal.SIGSTOP)
    try:
        assert channel.read() == b""
        assert "no heartbeat for 0.3 s" in channel.stderr_tail()
        assert hub_of(transport) != hub
    finally:
        os.kill(hub, signal.SIGKILL)


def test_a_hub_ends_when_its_submitter_is_silent(make: Callable[..., MultiplexedTransport]) -> None:
    source = "import sys; text = r'''HUB'''.replace('_SILENCE_S = 30.0', '_SILENCE_S = 0.3'); exec(text)"
    transport = make(ReplacedHub(source), ping_s=60.0)
    channel = transport.open(["cat"])
    assert channel.read() == b""
    assert "the connection to distflow's process there ended (exit code 0)" in channel.stderr_tail()


def test_hang_up_ends_all_calls_and_the_next_one_connects(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make()
    hub = hub_of(transport)
    channel = transport.open(["cat"])
    transport.hang_up()
    assert channel.read() == b""
    assert hub_of(transport) != hub
    wait_until(lambda: not is_alive(hub), what="the first hub ended")
    transport.close()
    with pytest.raises(NodeUnreachable, match="login: the transport is closed"):
        transport.run(["true"], timeout_s=60)


READY = """import os, struct, sys
frame = struct.Struct(">BII").pack
os.write(1, (sys.argv[1] + " ready\\n").encode())
os.read(0, 1)
"""
HOSTILE = {
    "random bytes": READY + "os.write(1, b'\\xff' * 100)",
    "a frame without end": READY + "os.write(1, frame(11, 1, 1 << 30))",
    "more output than the window": READY + "while True: os.write(1, frame(11, 1, 1 << 20) + bytes(1 << 20))",
    "output after its end": READY + "os.write(1, frame(11, 1, 0) + frame(11, 1, 0))",
    "more credit than the window": READY + "os.write(1, frame(9, 1, 4) + b'\\xff' * 4)",
    "a credit of two bytes": READY + "os.write(1, frame(9, 1, 2) + b'xx')",
    "an exit without a code": READY + "os.write(1, frame(13, 1, 0))",
    "an unknown kind": READY + "os.write(1, frame(99, 1, 0))",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_data_ends_the_connection(make: Callable[..., MultiplexedTransport], text: str) -> None:
    transport = make(ReplacedHub(text + "\nimport time; os.close(1); os.read(0, 1 << 20)"))
    channel = transport.open(["cat"])
    wait_until(lambda: channel._error is not None, what="the connection ended")
    reason = "unknown message kind 99" if "frame(99" in text else ""
    assert f"login: it sent a malformed message: {reason}" in channel.stderr_tail()
    with pytest.raises(NodeUnreachable, match="malformed"):
        channel.write(b"x")


def test_frames_of_unknown_channels_are_ignored(make: Callable[..., MultiplexedTransport]) -> None:
    unknown = "frame(11, 77, 3) + b'abc' + frame(13, 78, 1) + b'x' + frame(12, 1, 4) + b'said'"
    transport = make(ReplacedHub(READY + f"os.write(1, {unknown}); os.read(0, 1 << 20); os.read(0, 1)"))
    channel = transport.open(["cat"])
    wait_until(lambda: channel.stderr_tail() == "said", what="the frame after them arrived")
    assert channel.exit_code is None


def test_a_command_whose_output_was_lost_has_no_exit_code(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make(ReplacedHub(READY + "os.write(1, frame(13, 1, 1) + b'\\0' + frame(12, 1, 0) + frame(11, 1, 4) + b'part')"))
    channel = transport.open(["cat"])
    assert (channel.read(), channel.read(), channel.exit_code) == (b"part", b"", None)


def test_heartbeats_do_not_wait_behind_input(make: Callable[..., MultiplexedTransport]) -> None:
    beats = "import select\nfor _ in range(15): select.select([], [], [], 0.05); os.write(1, frame(10, 0, 0))\n"
    transport = make(ReplacedHub(READY + beats + "os.write(1, frame(12, 1, 4) + b'said')"), ping_s=0.1)
    channel = transport.open(["cat"])
    channel.write(b"x" * 1_500_000)  # it is never read
    wait_until(lambda: "said" in channel.stderr_tail(), what="the hub sent all heartbeats")
    assert "no heartbeat" not in channel.stderr_tail()


def test_endless_output_instead_of_a_hub_is_refused(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make(ReplacedHub("import os\nwhile True: os.write(1, b'noise ' * 10000)"))
    with pytest.raises(NodeUnreachable, match="login: the node printed more than 4 MiB before"):
        transport.run(["true"], timeout_s=30)


def test_output_of_login_scripts_before_the_hub_is_skipped(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make(ReplacedHub("import os; os.write(1, b'Welcome to the cluster\\n' * 1000); exec(r'''HUB''')"))
    assert transport.run(["echo", "hi"], timeout_s=60).stdout == b"hi\n"


def test_a_hub_that_is_killed_at_its_start_is_unreachable(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make(ReplacedHub("import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(NodeUnreachable, match=r"login: signal 9 ended `.*` before it answered"):
        transport.run(["true"], timeout_s=60)


def test_a_machine_without_python_is_named(make: Callable[..., MultiplexedTransport]) -> None:
    with pytest.raises(
        BootstrapFailed, match=r"login: Python 3\.8 or newer is needed; `/no/such/python` does not exist"
    ) as caught:
        make(python="/no/such/python").run(["true"], timeout_s=60)
    assert caught.value.hint.startswith("install it there; a login without a terminal must find it as `/no/such/python`")


def test_a_command_past_its_timeout_is_killed_with_its_background_processes(
    make: Callable[..., MultiplexedTransport], marker: str
) -> None:
    transport = make()
    with pytest.raises(NodeUnreachable, match="login: `sh` did not finish within"):
        transport.run(["sh", "-c", f"sh -c 'sleep 60; :' {marker} & :"], timeout_s=0.5)
    wait_until(lambda: not processes_with(marker), what="its background processes are gone")
    assert transport.run(["true"], timeout_s=60).exit_code == 0


def test_data_that_is_written_before_close_arrives(
    make: Callable[..., MultiplexedTransport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.transports.multiplexed._FLUSH_S", 30.0)  # on a busy machine, sending takes long
    os.mkfifo(tmp_path / "go")
    transport = make()
    channel = transport.open(
        ["sh", "-c", f"read word < {tmp_path}/go; cat > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/all"]
    )
    data = os.urandom(1_500_000)
    channel.write(data)
    channel.close()
    closing = threading.Thread(target=transport.close)
    closing.start()
    (tmp_path / "go").write_text("go\n")
    closing.join()
    wait_until((tmp_path / "all").exists, what="the command ended")
    assert (tmp_path / "all").read_bytes() == data


def test_commands_have_the_same_environment_and_limits_as_without_a_hub(
    make: Callable[..., MultiplexedTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANG", raising=False)
    monkeypatch.delenv("LC_ALL", raising=False)
    script = "env | grep -v ^_= | sort; pwd; umask; ulimit -n; grep -E 'Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd"
    argv = ["sh", "-c", script]
    assert make().run(argv, timeout_s=60).stdout == LocalTransport().run(argv, timeout_s=60).stdout


def test_ended_commands_and_connections_leave_no_processes_and_descriptors(make: Callable[..., MultiplexedTransport]) -> None:
    transport = make()
    hub = hub_of(transport)

    def open_files() -> set[str]:
        return {f"{pid} {fd}" for pid in ("self", hub) for fd in os.listdir(f"/proc/{pid}/fd")}

    before = open_files()
    for _ in range(10):
        transport.run(["cat"], input=b"x" * 1000, timeout_s=60)
        transport.open(["cat"]).close()
        assert transport.open(["/no/such/program"]).read() == b""
        with pytest.raises(NodeUnreachable):
            transport.dial(1, timeout_s=60)
    wait_until(lambda: open_files() <= before, what="all descriptors are closed")
    wait_until(lambda: not Path(f"/proc/{hub}/task/{hub}/children").read_text(), what="all commands are reaped")
    connection = transport._shared.current
    assert connection is not None
    assert not connection._channels
