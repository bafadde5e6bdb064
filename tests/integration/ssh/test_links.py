"""SSH over links that a test cuts: hosts in network namespaces, whose packets are then dropped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from distflow.errors import NodeUnreachable
from distflow.testing.kernel import NetnsHost, Network
from distflow.testing.waiting import wait_until
from integration.ssh.conftest import Reach
from integration.ssh.test_hostkeys import works

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def host(network: Network, tmp_path_factory: pytest.TempPathFactory) -> NetnsHost:
    return network.host(tmp_path_factory.mktemp("far"))


def test_a_transport_reports_the_address_of_its_host(host: NetnsHost, reach: Reach) -> None:
    transport = reach(host.sshd)
    assert works(transport)
    assert transport.reached_address == host.address


def test_a_host_that_is_cut_off_is_unreachable_until_its_link_is_restored(host: NetnsHost, reach: Reach) -> None:
    transport = reach(host.sshd, connect_timeout_s=3.0)
    host.cut()
    try:
        with pytest.raises(NodeUnreachable, match=r"did not answer within 3 s"):
            transport.open(["true"])
    finally:
        host.heal()
    assert works(transport)


def test_a_channel_over_a_cut_link_is_closed_at_once(host: NetnsHost, reach: Reach) -> None:
    transport = reach(host.sshd)
    channel = transport.open(["cat"])
    channel.write(b"one\n")
    assert channel.read() == b"one\n"
    outcome: list[BaseException | None] = []

    def write() -> None:
        # This is more than all buffers hold.
        try:
            channel.write(b"x" * (64 << 20))
            outcome.append(None)
        except NodeUnreachable as error:
            outcome.append(error)

    host.cut()
    try:
        threads = [threading.Thread(target=write), threading.Thread(target=channel.read)]
        for thread in threads:
            thread.start()
        threads[0].join(0.5)
        assert threads[0].is_alive()
        channel.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert isinstance(outcome[0], NodeUnreachable)
    finally:
        host.heal()
    assert works(transport)


def test_a_run_over_a_cut_link_ends_with_its_timeout(host: NetnsHost, reach: Reach, tmp_path: Path) -> None:
    transport = reach(host.sshd)
    assert works(transport)
    outcome: list[str] = []

    def run() -> None:
        try:
            transport.run(["sh", "-c", f"touch {tmp_path / 'up'}; sleep 100"], timeout_s=5.0)
        except NodeUnreachable as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until((tmp_path / "up").exists, 20, "the command runs")
    host.cut()
    try:
        thread.join(60)
        assert outcome == [f"{host.namespace}: `sh` did not finish within 5 s"]
        before = time.monotonic()
        transport.close()
        assert time.monotonic() - before < 60  # the command would take 100
    finally:
        host.heal()


def test_keepalives_detect_a_link_that_is_cut(host: NetnsHost, reach: Reach) -> None:
    config = host.sshd.directory / "impatient"
    config.write_text(host.sshd.client_stanza(ServerAliveInterval="1", ServerAliveCountMax="1"))
    transport = reach(host.sshd, config_file=str(config))
    channel = transport.open(["cat"])
    ended = threading.Thread(target=channel.read)
    ended.start()
    host.cut()
    try:
        ended.join(15)
        assert not ended.is_alive()
        assert "[connection]" in channel.stderr_tail()
    finally:
        host.heal()
        channel.close()
