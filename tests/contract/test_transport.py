"""The contract of transports (``transports.base``), for every transport."""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from contract.conftest import processes_with
from distflow.errors import NodeUnreachable
from distflow.testing.waiting import wait_until
from distflow.transports.base import REASON_MARK, Channel
from distflow.transports.local import LocalTransport
from distflow.transports.multiplexed import MultiplexedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distflow.transports.base import Transport

HOSTILE = ["a b", "a'b", 'a"b', "$HOME", "`id`", "a\nb", "*", "", "ü→", "-n", "\\", "!x", "~"]


ON_SSH = pytest.mark.ssh
ENGINES = ("slurm", "ray", "kubernetes")


@pytest.fixture(
    params=[
        "local",
        pytest.param("ssh", marks=ON_SSH),
        "hub",
        pytest.param("hub over ssh", marks=ON_SSH),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES),
    ]
)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """A transport to this machine."""
    over_ssh: Callable[[], Transport] | None = request.getfixturevalue("over_ssh") if "ssh" in request.param else None
    made: Transport = LocalTransport() if over_ssh is None else over_ssh()
    if request.param in ENGINES:
        made = request.getfixturevalue(f"over_{request.param}")()
    if "hub" in request.param:
        made = MultiplexedTransport(made, python=sys.executable)
    yield made
    made.close()


def read_all(channel: Channel) -> bytes:
    pieces = iter(channel.read, b"")
    return b"".join(pieces)


def test_the_exit_code_and_both_outputs_of_a_command_are_returned(transport: Transport) -> None:
    for code in (0, 1, 3, 255):
        done = transport.run(["sh", "-c", f"echo out; echo err >&2; exit {code}"], timeout_s=60)
        assert (done.exit_code, done.stdout, done.stderr) == (code, b"out\n", b"err\n")
    # 128 and the number of the signal
    assert transport.run(["sh", "-c", "kill -9 $$"], timeout_s=60).exit_code == 137
    done = transport.run(["/no/such/program"], timeout_s=60)
    assert done.exit_code == 127
    assert b"/no/such/program" in done.stderr


def test_arguments_arrive_byte_by_byte(transport: Transport) -> None:
    code = "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))"
    done = transport.run([sys.executable, "-c", code, *HOSTILE], timeout_s=60)
    assert done.stdout.decode().split("\0") == HOSTILE


def test_megabytes_in_every_direction_never_block(transport: Transport) -> None:
    code = "import sys; d=sys.stdin.buffer.read(); sys.stderr.buffer.write(d); sys.stdout.buffer.write(d)"
    data = os.urandom(3 * 1024 * 1024)
    done = transport.run([sys.executable, "-c", code], input=data, timeout_s=30)
    assert done.stdout == data
    assert done.stderr == data


def test_a_command_past_its_timeout_is_stopped_and_the_error_names_its_node(transport: Transport, marker: str) -> None:
    with pytest.raises(NodeUnreachable, match=transport.name):
        transport.run(["sh", "-c", "sleep 60; :", marker], timeout_s=0.3)
    wait_until(lambda: not processes_with(marker), what="the command is gone")


def test_a_channel_carries_bytes_both_ways_to_a_session_of_its_own(transport: Transport) -> None:
    # One write, because `print` of an unbuffered Python writes the line feed separately.
    code = "import os; os.write(1, b'%d\\n' % os.getsid(0)); os.execlp('sh', 'sh', '-c', 'cat; echo bye >&2')"
    channel = transport.open([sys.executable, "-c", code])
    assert int(channel.read()) != os.getsid(0)
    channel.write(b"one\n")
    assert channel.read() == b"one\n"
    channel.close()
    assert channel.read() == b""


def test_a_channel_has_the_exit_code_of_its_command_at_its_end(transport: Transport) -> None:
    channel = transport.open(["sh", "-c", "read x; exit 7"])
    codes = [channel.exit_code]
    channel.write(b"go\n")
    assert channel.read() == b""
    assert [*codes, channel.exit_code] == [None, 7]
    channel.close()
    channel = transport.open(["/no/such/program"])
    assert channel.read() == b""
    assert "/no/such/program" in channel.stderr_tail()
    assert channel.exit_code == 127
    channel.close()


def test_stderr_is_drained_in_the_background_and_its_tail_is_kept(transport: Transport) -> None:
    code = "import sys; sys.stderr.write('x' * 3_000_000 + 'last line'); sys.stderr.flush(); print('done')"
    channel = transport.open([sys.executable, "-c", code])
    assert read_all(channel) == b"done\n"
    assert channel.stderr_tail().endswith("last line")
    assert len(channel.stderr_tail()) < 100_000
    channel.close()


def test_writes_of_several_threads_stay_whole(transport: Transport) -> None:
    channel = transport.open(["cat"])
    lines = [bytes([65 + number]) * 100_000 + b"\n" for number in range(8)]
    threads = [threading.Thread(target=channel.write, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    received = b""
    while received.count(b"\n") < len(lines):
        received += channel.read()
    for thread in threads:
        thread.join()
    assert sorted(received.splitlines(keepends=True)) == lines
    channel.close()


@pytest.mark.parametrize("blocked_in", ["read", "write"])
def test_close_frees_a_thread_that_is_blocked(transport: Transport, blocked_in: str) -> None:
    channel = transport.open(["sh", "-c", "read word; :"])
    results: list[object] = []

    def block() -> None:
        try:
            if blocked_in == "read":
                results.append(channel.read())
            else:
                channel.write(b"x" * 50_000_000)
        except NodeUnreachable as error:
            results.append(error)

    thread = threading.Thread(target=block)
    thread.start()
    threading.Event().wait(0.1)
    assert thread.is_alive()
    channel.close()
    channel.close()
    thread.join(20)
    assert not thread.is_alive()
    assert results == [b""] or isinstance(results[0], NodeUnreachable)


def test_writing_to_an_ended_command_raises_an_error(transport: Transport) -> None:
    channel = transport.open(["true"])
    assert channel.read() == b""

    def is_refused() -> bool:
        try:
            channel.write(b"x" * 100_000)
        except NodeUnreachable:
            return True
        return False

    wait_until(is_refused)
    channel.close()


def test_closing_stops_nothing_on_the_node(transport: Transport, marker: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    channel = transport.open(["sh", "-c", f"exec 0</dev/null; echo up; read word < {tmp_path}/fifo", marker])
    assert channel.read() == b"up\n"
    channel.close()
    transport.close()
    transport.close()
    assert processes_with(marker)
    (tmp_path / "fifo").write_text("enough\n")
    wait_until(lambda: not processes_with(marker), what="the command ended by itself")


def test_a_stream_reaches_a_port_of_the_node_and_each_direction_ends_by_itself(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = transport.dial(server.getsockname()[1], timeout_s=60)
        connection, _ = server.accept()
        with connection:
            data = os.urandom(300_000)

            def write() -> None:
                stream.write(data)
                stream.end()

            writer = threading.Thread(target=write)
            writer.start()
            assert b"".join(iter(lambda: connection.recv(65536), b"")) == data
            writer.join()
            connection.sendall(b"still open")
            assert stream.read() == b"still open"
        assert stream.read() == b""
        stream.close()
        stream.close()


def test_a_stream_continues_while_the_server_writes_without_reading(transport: Transport) -> None:
    data = bytes(32 << 20)  # more than all buffers on the way: those to a pod hold 22 MiB

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(data)
            received.append(sum(iter(lambda: len(connection.recv(1 << 16)), 0)))

    def write() -> None:
        stream.write(data)
        stream.end()

    received: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads = [threading.Thread(target=work, daemon=True) for work in (serve, write)]
        stream = transport.dial(server.getsockname()[1], timeout_s=60)
        for thread in threads:
            thread.start()
        assert sum(map(len, iter(stream.read, b""))) == len(data)
        for thread in threads:
            thread.join(60)
        assert received == [len(data)]
        stream.close()


def test_a_port_without_a_listener_is_reported(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NodeUnreachable, match=f"{transport.name}: nothing answers on its port {port}") as caught:
        transport.dial(port, timeout_s=60)
    assert REASON_MARK not in str(caught.value)  # the connection to the node is not at fault


def test_closing_a_stream_ends_a_read(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = transport.dial(server.getsockname()[1], timeout_s=60)
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(stream.read()))
        reader.start()
        stream.close()
        reader.join(60)
        assert found == [b""]
