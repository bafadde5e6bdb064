"""Commands over a real sshd: properties that the contract tests do not cover."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import paramiko
import pytest
from paramiko.common import cMSG_CHANNEL_EOF

from distflow.backends.machines.connection.bootstrap import connect
from distflow.errors import DistflowError, NodeUnreachable
from distflow.shell import quote
from distflow.testing.sshd import Sshd
from distflow.testing.waiting import wait_until
from distflow.transports.base import Transport, fan_out
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.paramiko_adapter import PatchedTransport
from distflow.transports.ssh.transport import SshTransport
from integration.ssh.conftest import MakeServer, Reach

pytestmark = pytest.mark.ssh

_MIB = 1 << 20


def _is_unreachable(transport: Transport) -> bool:
    try:
        transport.run(["true"], timeout_s=5)
    except NodeUnreachable:
        return True
    return False


def test_connections_use_aes_gcm_without_compression(server: Sshd, reach: Reach) -> None:
    transport = reach(server)
    transport.run(["true"], timeout_s=60)
    link = transport._shared.current
    assert link is not None
    wire = link._transport
    assert wire is not None
    assert wire.local_cipher == vars(wire)["remote_cipher"] == "aes128-gcm@openssh.com"
    assert wire.local_compression == "none"


def test_an_unused_transport_does_not_connect(server: Sshd) -> None:
    before = server.log.read_text().count("Connection from")
    transport = SshTransport("gpu1", SshDestination(host="gpu1", config_file=str(server.client_config)))
    transport.close()
    assert server.log.read_text().count("Connection from") == before


def test_many_threads_share_one_connection(server: Sshd, reach: Reach) -> None:
    transport = reach(server)
    before = server.log.read_text().count("Accepted publickey")
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(transport.run(["echo", str(n)], timeout_s=30).stdout))
        for n in range(8)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == [b"%d\n" % n for n in range(8)]
    assert server.log.read_text().count("Accepted publickey") == before + 1


def test_a_run_transfers_32_mib_in_each_direction_with_output_on_stderr(server: Sshd, reach: Reach) -> None:
    code = (
        "import os,sys,threading\n"
        "def noise():\n for _ in range(4096): os.write(2, b'n' * 1024)\n"
        "thread = threading.Thread(target=noise); thread.start()\n"
        "while data := os.read(0, 1 << 20):\n"
        " while data: data = data[os.write(1, data):]\n"
        "thread.join()"
    )
    data = os.urandom(_MIB) * 32
    done = reach(server).run([sys.executable, "-c", code], input=data, timeout_s=60)
    assert done.exit_code == 0
    assert done.stdout == data
    assert len(done.stderr) == 4 * _MIB


def test_a_channel_transfers_32_mib_in_each_direction(server: Sshd, reach: Reach) -> None:
    channel = reach(server).open(["cat"])
    data = os.urandom(_MIB) * 32
    writer = threading.Thread(target=channel.write, args=(data,), daemon=True)
    writer.start()
    received = bytearray()
    while len(received) < len(data):
        piece = channel.read()
        assert piece
        assert len(piece) <= 65536
        received += piece
    writer.join(60)
    channel.close()
    assert received == data


def test_close_may_be_called_twice_and_is_final(server: Sshd, reach: Reach) -> None:
    transport = reach(server)
    channel = transport.open(["cat"])
    transport.close()
    transport.close()
    assert channel.read() == b""
    channel.close()
    channel.close()
    with pytest.raises(NodeUnreachable, match="gpu1: the transport is closed"):
        transport.open(["true"])
    with pytest.raises(NodeUnreachable, match="gpu1: the transport is closed"):
        transport.run(["true"], timeout_s=5)


def test_the_end_of_the_connection_is_reported_and_the_next_use_reconnects(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    transport = reach(server)
    channel = transport.open(["cat"])
    channel.write(b"one\n")
    assert channel.read() == b"one\n"
    server.restart()
    assert channel.read() == b""
    assert re.search(r"\[connection\] .*@.*: it closed the connection$", channel.stderr_tail(), re.MULTILINE)
    with pytest.raises(NodeUnreachable):
        wait_until(lambda: channel.write(b"two\n"), 15, "the end of the connection is detected")
    channel.close()
    assert transport.run(["echo", "again"], timeout_s=60).stdout == b"again\n"


def test_a_run_that_loses_its_connection_fails_as_unreachable(make_server: MakeServer, reach: Reach, tmp_path: Path) -> None:
    server = make_server()
    transport = reach(server)
    found: list[NodeUnreachable] = []
    received_input = tmp_path / "received_input"

    def run() -> None:
        with pytest.raises(NodeUnreachable, match="gpu9: the connection broke while `sh` ran: ") as caught:
            transport.run(["sh", "-c", f"cat > {received_input}; sleep 30"], input=b"it runs", timeout_s=30)
        found.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    # The command has read its input, so it runs.
    wait_until(lambda: received_input.exists() and received_input.read_bytes(), 20, "the command runs")
    server.stop()
    thread.join(20)
    assert found[0].message.count("gpu9") == 1


def test_commands_fail_while_the_server_is_stopped_and_run_after_its_restart(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    transport = reach(server)
    assert transport.run(["echo", "1"], timeout_s=60).stdout == b"1\n"
    server.stop()
    wait_until(lambda: _is_unreachable(transport), 20, "the end of the connection is detected")
    assert _is_unreachable(transport)
    server.start()
    assert transport.run(["echo", "2"], timeout_s=60).stdout == b"2\n"


def test_output_of_a_forced_command_does_not_disturb_the_agent(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(alias="noisy")
    wrapper = server.directory / "wrapper"
    wrapper.write_text(
        '#!/bin/sh\necho "Welcome to the cluster!"\nprintf "no newline at the end"\necho warning >&2\n'
        'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    wrapper.chmod(0o755)
    server._options["ForceCommand"] = str(wrapper)
    server.restart()
    link = connect(reach(server), str(server.home / "root"), sys.executable, timeout_s=30)
    try:
        assert link.request("hello", watch=[])["facts"]["python"]
        assert "Welcome to the cluster!" in link.noise
    finally:
        link.close()


def test_output_of_a_startup_file_does_not_disturb_the_agent(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(alias="chatty")
    for name in (".bashrc", ".zshenv", ".profile"):
        (server.home / name).write_text("echo stale file handle; cat /no/such/motd\n")
    link = connect(reach(server), "~/root", sys.executable, timeout_s=30)
    try:
        assert link.request("hello", watch=[])["facts"]["root"] == str(server.home / "root" / "distflow-node")
    finally:
        link.close()


def test_a_command_continues_after_the_end_of_the_connection(server: Sshd, reach: Reach, tmp_path: Path) -> None:
    transport = reach(server)
    code = f"import os,sys\nos.write(1, b'up')\nwhile os.read(0, 1): pass\nopen({str(tmp_path / 'proof')!r}, 'w').close()"
    channel = transport.open([sys.executable, "-c", code])
    assert channel.read() == b"up"
    transport.close()
    wait_until((tmp_path / "proof").exists, 20, "the command continued after the connection")


def test_fan_out_returns_a_result_or_an_error_for_each_node(server: Sshd, make_server: MakeServer, reach: Reach) -> None:
    other, stopped = make_server("gpu2", "127.0.1.2"), make_server("gpu3", "127.0.1.3")
    stopped.stop()
    transports = [reach(one) for one in (server, stopped, other)]
    outcomes = fan_out(transports, lambda one: one.run(["echo", one.name], timeout_s=60).stdout)
    assert [one.node for one in outcomes] == ["gpu1", "gpu3", "gpu2"]
    assert [one.value for one in outcomes] == [b"gpu1\n", None, b"gpu2\n"]
    assert [one.is_ok for one in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].error, NodeUnreachable)
    assert "nothing listens there" in str(outcomes[1].error)


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "tcsh"])
def test_arguments_arrive_through_every_login_shell(shell: str, make_server: MakeServer, reach: Reach) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    # sshd runs the user's shell with -c and the command. This forced command does the same, without an account for each shell.
    forced = f'{quote([path])} -c "$SSH_ORIGINAL_COMMAND"'
    server = make_server(alias=shell, options={"ForceCommand": forced})
    words = ["a b", "a'b", 'a"b', "$HOME", "`id`", "a\nb\n", "*", "", "ü→", "-n", "\\", "\\\\n", "!x", "~", "=ls", "%d", "a\tb"]
    done = reach(server).run(["printf", "%s\\0", *words], timeout_s=60)
    assert done.stdout.decode().split("\0")[:-1] == words, done.stderr
    assert reach(server).run(["/no/such/program"], timeout_s=60).exit_code == 127


def test_a_server_without_sessions_is_reported(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(options={"MaxSessions": "0"})
    with pytest.raises(DistflowError, match=r"gpu9: .*channel") as caught:
        reach(server).run(["true"], timeout_s=10)
    assert "MaxSessions" in caught.value.hint


def test_starting_a_command_on_a_frozen_server_times_out(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    transport = reach(server, connect_timeout_s=60)
    transport.run(["true"], timeout_s=60)
    server.freeze()
    before = time.monotonic()
    with pytest.raises(NodeUnreachable, match="did not start a command within 1 s"):
        transport.run(["true"], timeout_s=1)
    assert time.monotonic() - before < 50  # connecting may take 60
    server.thaw()
    assert transport.run(["echo", "thawed"], timeout_s=60).stdout == b"thawed\n"


def test_an_idle_connection_is_polled_once_a_second(server: Sshd, reach: Reach) -> None:
    # At paramiko's 0.1 s, a hundred idle nodes keep a core busy. The attribute is private: this proves that it still works.
    transport = reach(server)
    transport.run(["true"], timeout_s=60)
    assert transport._shared.current is not None
    assert transport._shared.current._transport is not None
    assert transport._shared.current._transport.sock.gettimeout() == 1.0


def test_closed_connections_leave_no_descriptors_and_no_threads(server: Sshd, reach: Reach) -> None:
    def open_resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = open_resources()
    for _ in range(3):
        transport = reach(server)
        channel = transport.open(["cat"])
        transport.run(["true"], timeout_s=60)
        transport.close()
        channel.close()
    wait_until(lambda: open_resources() <= before, 20, f"as few descriptors and threads as before: {before}")
    wait_until(lambda: server.connections() == 0, 20, "sshd serves no connection")


def test_commands_that_end_before_they_read_their_input_do_not_end_the_connection(server: Sshd, reach: Reach) -> None:
    # sshd disconnects if it gets a message for a closed channel: one late message would end all commands.
    transport = reach(server)
    bystander = transport.open(["cat"])
    before = server.log.read_text().count("Accepted publickey")
    outcomes = fan_out([transport] * 96, lambda one: one.run(["true"], input=b"x" * 200_000, timeout_s=60).exit_code, limit=8)
    assert [one.error for one in outcomes if not one.is_ok] == []
    bystander.write(b"still here\n")
    assert bystander.read() == b"still here\n"
    assert server.log.read_text().count("Accepted publickey") == before
    bystander.close()


def test_a_command_can_end_during_a_key_exchange(server: Sshd, reach: Reach, tmp_path: Path) -> None:
    # paramiko's own thread would wait for the end of the key exchange before it answers, and never finish the exchange.
    node = reach(server)
    command = node.open(["sh", "-c", f"echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; read line"])
    wait_until((tmp_path / "pid").exists, 20, "the command runs")
    assert node._shared.current is not None
    first = node._shared.current._transport
    assert first is not None
    read_message, is_waiting, may_read = first.packetizer.read_message, threading.Event(), threading.Event()

    def read_later() -> object:
        is_waiting.set()
        may_read.wait(60)
        return read_message()

    vars(first.packetizer)["read_message"] = read_later
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert is_waiting.wait(20)  # the thread has read the first of several messages about the end of the command
    exchange = threading.Thread(target=first.renegotiate_keys, daemon=True)
    exchange.start()
    wait_until(lambda: not first.clear_to_send.is_set(), 20, "the key exchange has begun")
    may_read.set()
    assert command.read() == b""
    exchange.join(60)
    assert first.is_active()
    assert command.exit_code == 128 + signal.SIGKILL
    assert node.run(["echo", "still here"], timeout_s=60).stdout == b"still here\n"
    assert node._shared.current._transport is first


def test_the_reason_of_a_disconnect_is_reported(server: Sshd, reach: Reach) -> None:
    node = reach(server)
    command = node.open(["cat"])
    assert node._shared.current is not None
    transport = node._shared.current._transport
    assert transport is not None
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_EOF)
    message.add_int(4321)
    transport._send_message(message)
    assert command.read() == b""
    wait_until(lambda: not transport.is_active(), 20, "sshd has disconnected")
    assert "nonexistent channel" in command.stderr_tail()


@pytest.mark.parametrize("by", ["server", "client"])
def test_keys_are_exchanged_again_while_commands_start_and_end(
    make_server: MakeServer, reach: Reach, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    exchanges: list[object] = []
    original = PatchedTransport._parse_newkeys
    monkeypatch.setattr(PatchedTransport, "_parse_newkeys", lambda wire, message: exchanges.append(original(wire, message)))
    server = make_server(options={"RekeyLimit": "1M"} if by == "server" else {})
    transport = reach(server)
    data = os.urandom(_MIB) * 8
    assert transport.run(["true"], timeout_s=60).exit_code == 0
    assert transport._shared.current is not None
    assert transport._shared.current._transport is not None
    first = transport._shared.current._transport
    if by == "client":
        vars(first.packetizer)["REKEY_BYTES"] = _MIB
    ended = threading.Event()

    def run_short_commands(one: Transport) -> int:
        count = 0
        while not ended.is_set():
            assert one.run(["true"], input=b"x" * 10_000, timeout_s=60).exit_code == 0
            count += 1
        return count

    def transfer_data(one: Transport) -> int:
        try:
            return len(one.run(["cat"], input=data, timeout_s=60).stdout)
        finally:
            ended.set()

    actions = iter([transfer_data, run_short_commands, run_short_commands])

    def act(one: Transport) -> int:
        return next(actions)(one)

    outcomes = fan_out([transport] * 3, act)
    assert [one.error for one in outcomes if not one.is_ok] == []
    assert len(data) in [one.value for one in outcomes]
    assert transport._shared.current._transport is first
    assert len(exchanges) >= 4
