"""Many commands over one session of one SSH connection."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distflow.errors import NodeUnreachable
from distflow.testing.sshd import _children
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.base import REASON_MARK
from distflow.transports.multiplexed import MultiplexedTransport

if TYPE_CHECKING:
    from integration.ssh.conftest import MakeServer, Reach

pytestmark = pytest.mark.ssh
CHANNELS = 200


def test_hundreds_of_channels_share_one_session(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(options={"MaxSessions": "1"})
    transport = MultiplexedTransport(reach(server), python=sys.executable)
    channels = [transport.open(["sh", "-c", "cat; echo end >&2; exit 3"]) for _ in range(CHANNELS)]
    texts = [os.urandom(20_000) for _ in channels]
    received = [b""] * CHANNELS

    def talk(number: int) -> None:
        channels[number].write(texts[number])
        while len(received[number]) < len(texts[number]):
            received[number] += channels[number].read()
        channels[number].end()

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(CHANNELS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received == texts
    assert [channel.read() for channel in channels] == [b""] * CHANNELS
    assert {(channel.exit_code, channel.stderr_tail()) for channel in channels} == {(3, "end\n")}
    assert server.connections() == 1
    assert server.log.read_text().count("Starting session: command") == 1
    transport.close()


def test_commands_survive_a_connection_that_is_cut(make_server: MakeServer, reach: Reach, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    server = make_server()
    transport = MultiplexedTransport(reach(server), python=sys.executable)
    channel = transport.open(["sh", "-c", f"echo $$; read word < {tmp_path}/fifo"])
    command = int(channel.read())
    assert server._process is not None
    for pid in _children(server._process.pid):
        os.kill(pid, signal.SIGKILL)
    assert channel.read() == b""
    assert channel.exit_code is None
    assert REASON_MARK in channel.stderr_tail()
    with pytest.raises(NodeUnreachable):
        channel.write(b"x")
    assert transport.run(["echo", "again"], timeout_s=60).stdout == b"again\n"
    assert is_alive(command)
    (tmp_path / "fifo").write_text("enough\n")
    wait_until(lambda: not is_alive(command), what="the command ended by itself")
    transport.close()


def test_a_dead_connection_is_found_by_heartbeats(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    inner = reach(server)
    transport = MultiplexedTransport(inner, python=sys.executable, ping_s=0.2)
    channel = transport.open(["cat"])
    assert transport.run(["true"], timeout_s=60).exit_code == 0
    dead = inner._shared.current
    server.freeze()
    try:
        assert channel.read() == b""
        assert "gpu9: no heartbeat for 0.6 s" in channel.stderr_tail()
    finally:
        server.thaw()
    assert transport.run(["true"], timeout_s=60).exit_code == 0
    assert inner._shared.current is not dead
    transport.close()
