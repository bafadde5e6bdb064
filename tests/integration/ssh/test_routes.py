"""Routes to a host (direct, jump hosts, proxy commands), and their failures: each is named, and respects its timeout."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distflow.errors import HostKeyUnknown, NodeUnreachable, TransportError
from distflow.shell import quote
from distflow.testing.daemons import free_port
from distflow.testing.sshd import Sshd
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.base import fan_out
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.transport import SshTransport
from integration.ssh.conftest import MakeServer, Reach
from integration.ssh.test_hostkeys import works

pytestmark = pytest.mark.ssh

Configure = Callable[..., str]

_PIPE = (
    "import os,socket,sys,threading\n"
    "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    "def up():\n"
    " while d := os.read(0, 65536): s.sendall(d)\n"
    " s.shutdown(1)\n"
    "threading.Thread(target=up, daemon=True).start()\n"
    "while d := s.recv(65536):\n"
    " while d: d = d[os.write(1, d):]\n"
)


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """A program that connects its standard input and output with a host and port."""
    program = tmp_path / "pipe.py"
    program.write_text(_PIPE)
    return quote([sys.executable, str(program)])


@contextlib.contextmanager
def listener(greeting: bytes | None) -> Iterator[int]:
    """A port whose server sends only ``greeting``; with ``None``, it closes each connection at once."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if greeting is None:
                        connection.close()
                    elif greeting:
                        connection.sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that does not answer, made without root: its queue is full, so the kernel drops new connections."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield int(server.getsockname()[1])


def transport_to(port: int, **fields: object) -> SshTransport:
    given = {"host": "127.0.0.1", "port": port, "user": "me", "config_file": "none", "connect_timeout_s": 2.0, **fields}
    return SshTransport("n1", SshDestination(**given))  # type: ignore[arg-type]


def failure(transport: SshTransport, within_s: float = 30.0) -> str:
    """Return the error when the node cannot be reached, and check that it comes in time."""
    before = time.monotonic()
    with pytest.raises(NodeUnreachable) as caught:
        transport.open(["true"])
    assert time.monotonic() - before < within_s
    transport.close()
    assert caught.value.node == "n1"
    return str(caught.value)


def test_a_closed_port_is_reported() -> None:
    port = free_port()
    assert failure(transport_to(port)).startswith(f"n1: me@127.0.0.1:{port}: nothing listens there (connection refused)\n")


def test_a_name_without_an_address_is_reported() -> None:
    message = failure(transport_to(22, host="no-such-host.invalid"), within_s=30)
    assert message.startswith("n1: me@no-such-host.invalid:22")
    assert any(
        text in message for text in ("this name has no address", "this name cannot be looked up", "did not answer within")
    )


def test_a_port_that_does_not_answer_ends_with_the_connect_timeout() -> None:
    with silent_port() as port:
        assert f"n1: me@127.0.0.1:{port} did not answer within 1 s" in failure(transport_to(port, connect_timeout_s=1.0))


def test_the_connect_timeout_of_the_configuration_is_used(configure: Configure) -> None:
    with silent_port() as port:
        config = configure("Host *\n  ConnectTimeout 1\n")
        assert "did not answer within 1 s" in failure(transport_to(port, config_file=config, connect_timeout_s=None))


def test_a_server_that_sends_no_banner_is_reported() -> None:
    with listener(b"") as port:
        message = failure(transport_to(port, connect_timeout_s=1.0))
    assert f"n1: me@127.0.0.1:{port} sent no SSH banner within 1 s" in message


def test_a_server_that_stops_in_the_key_exchange_is_reported() -> None:
    with listener(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        message = failure(transport_to(port, connect_timeout_s=3.0))
    assert f"n1: me@127.0.0.1:{port} did not finish the key exchange within 3 s" in message


def test_a_server_that_closes_the_connection_is_reported() -> None:
    with listener(None) as port:
        assert f"n1: me@127.0.0.1:{port} closed the connection before it sent" in failure(transport_to(port))


def test_a_server_that_does_not_speak_ssh_is_reported() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n" * 200) as port:
        assert f"n1: me@127.0.0.1:{port} is not an SSH server\ncheck the port {port}" in failure(transport_to(port))


def test_a_server_with_only_insecure_algorithms_is_refused(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(options={"Ciphers": "chacha20-poly1305@openssh.com"})
    with pytest.raises(NodeUnreachable, match=r"gpu9: .*no common algorithm: .*cipher"):
        works(reach(server))


def test_a_frozen_server_is_unreachable_until_it_continues(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    server.freeze()
    with pytest.raises(NodeUnreachable, match="sent no SSH banner within 2 s"):
        reach(server, connect_timeout_s=2.0).open(["true"])
    server.thaw()
    assert works(reach(server))


def test_a_failure_prints_nothing_and_does_not_delay_the_exit() -> None:
    code = (
        "import sys\n"
        "from distflow.errors import NodeUnreachable\n"
        "from distflow.transports.ssh.config import SshDestination\n"
        "from distflow.transports.ssh.transport import SshTransport\n"
        "given = SshDestination(host='127.0.0.1', port=int(sys.argv[1]), config_file='none', connect_timeout_s=0.5)\n"
        "try: SshTransport('n1', given).open(['true'])\n"
        "except NodeUnreachable as error: print(error.node)\n"
    )
    for greeting in (b"", b"SSH-2.0-OpenSSH_9.2\r\n", None):
        with listener(greeting) as port:
            done = subprocess.run([sys.executable, "-c", code, str(port)], capture_output=True, check=True, timeout=8)
        assert (done.stdout, done.stderr) == (b"n1\n", b"")


def test_closing_ends_a_connection_attempt() -> None:
    with listener(b"") as port:
        transport = transport_to(port, connect_timeout_s=30.0)
        found: list[NodeUnreachable] = []

        def attempt() -> None:
            with pytest.raises(NodeUnreachable) as caught:
                transport.open(["true"])
            found.append(caught.value)

        thread = threading.Thread(target=attempt)
        thread.start()
        wait_until(lambda: transport._shared._attempt is not None and transport._shared._attempt[0]._opened, 60, "it connects")
        transport.close()
        thread.join(60)
        assert found


def test_an_invalid_configuration_is_reported_with_its_line(server: Sshd, reach: Reach, configure: Configure) -> None:
    config = configure("Match weather sunny\n  User x\n")
    with pytest.raises(
        TransportError, match=r"gpu1: cannot use the SSH configuration: Unsupported Match attribute weather\n.*config line 1: "
    ):
        reach(server, config_file=config).open(["true"])


def test_aliases_and_includes_of_the_configuration_in_the_home_are_used(server: Sshd) -> None:
    folder = Path.home() / ".ssh"
    (folder / "conf.d").mkdir(parents=True)
    (folder / "config").write_text("Include conf.d/*.conf\nHost *\n  User another-user\n  Port 1\n")
    (folder / "conf.d" / "cluster.conf").write_text(server.client_stanza())
    transport = SshTransport("gpu1", SshDestination(host="gpu1"))
    try:
        assert works(transport)
        assert transport.reached_address == "127.0.1.1"
    finally:
        transport.close()


class TestJumpHosts:
    """Three real servers: the last is reached through the others."""

    @pytest.fixture
    def hops(self, make_server: MakeServer) -> tuple[Sshd, Sshd]:
        return make_server("bastion", "127.0.1.21"), make_server("inner", "127.0.1.22")

    def test_a_host_is_reached_through_two_hops_with_their_own_configurations(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        stanzas = [first.client_stanza(), second.client_stanza(), server.client_stanza(ProxyJump="bastion,inner")]
        transport = reach(server, config_file=configure(*stanzas))
        assert works(transport)
        assert transport.reached_address is None
        # The first hop connects to the second one, which connects to the server.
        assert "Accepted publickey" in first.log.read_text()
        assert "Accepted publickey" in second.log.read_text()
        data = os.urandom(1 << 20) * 4
        assert transport.run(["cat"], input=data, timeout_s=60).stdout == data
        transport.close()
        wait_until(
            lambda: first.connections() == 0 and second.connections() == 0, 20, "the jump hosts have closed all connections"
        )

    def test_a_host_is_reached_through_a_jump_host_with_its_own_jump_host(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        stanzas = [first.client_stanza(), second.client_stanza(ProxyJump="bastion"), server.client_stanza(ProxyJump="inner")]
        assert works(reach(server, config_file=configure(*stanzas)))
        assert "Accepted publickey" in first.log.read_text()

    def test_a_jump_host_can_be_given_by_its_address(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first = hops[0]
        stanza = first.client_stanza().replace("Host bastion", f"Host {first.address}").replace(f"  Port {first.port}\n", "")
        jump = f"ssh://{first.user}@{first.address}:{first.port}"
        assert works(reach(server, config_file=configure(stanza, server.client_stanza(ProxyJump=jump))))

    def test_each_hop_is_named_when_it_fails(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        target = server.client_stanza(ProxyJump="bastion,inner")
        second.stop()
        config = configure(first.client_stanza(), second.client_stanza(), target)
        with pytest.raises(NodeUnreachable) as caught:
            works(reach(server, config_file=config))
        where = f"jump host bastion ({first.user}@127.0.1.21:{first.port}) cannot connect to"
        assert f"gpu1: {where} jump host inner ({second.user}@127.0.1.22:{second.port})" in str(caught.value)
        first.stop()
        with pytest.raises(NodeUnreachable) as caught:
            works(reach(server, config_file=config))
        assert f"gpu1: jump host bastion ({first.user}@127.0.1.21:{first.port}): nothing listens there" in str(caught.value)

    def test_the_key_of_each_hop_is_checked(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first = hops[0]
        config = configure(first.client_stanza(UserKnownHostsFile="none"), server.client_stanza(ProxyJump="bastion"))
        with pytest.raises(HostKeyUnknown, match=r"the host key of jump host bastion \(.*\) is not known"):
            works(reach(server, config_file=config))
        unknown_target = server.client_stanza(ProxyJump="bastion", UserKnownHostsFile="none")
        with pytest.raises(HostKeyUnknown) as caught:
            works(reach(server, config_file=configure(first.client_stanza(), unknown_target)))
        # ssh-keyscan cannot reach this host from here.
        assert "ssh-keyscan" not in str(caught.value)

    def test_a_jump_host_that_does_not_allow_forwarding_is_reported(
        self, server: Sshd, make_server: MakeServer, reach: Reach, configure: Configure
    ) -> None:
        first = make_server("closed", "127.0.1.23", options={"AllowTcpForwarding": "no"})
        config = configure(first.client_stanza(), server.client_stanza(ProxyJump="closed"))
        with pytest.raises(NodeUnreachable, match=r"jump host closed \(.*\) does not allow forwarding to"):
            works(reach(server, config_file=config))

    def test_many_nodes_behind_one_jump_host_are_all_reached(
        self, server: Sshd, make_server: MakeServer, reach: Reach, configure: Configure
    ) -> None:
        # The jump host drops new connections while ten others have not logged in yet.
        bastion = make_server("bastion", "127.0.1.8", options={"MaxStartups": "10:100:10"})
        config = configure(bastion.client_stanza(), server.client_stanza(ProxyJump="bastion"))
        transports = [reach(server, config_file=config) for _ in range(24)]
        outcomes = fan_out(transports, lambda one: one.run(["true"], timeout_s=60).exit_code)
        assert [str(one.error or one.value) for one in outcomes] == ["0"] * 24

    def test_jump_hosts_in_a_loop_are_refused(self, server: Sshd, reach: Reach, configure: Configure) -> None:
        blocks = ["Host a\n  ProxyJump b\n", "Host b\n  ProxyJump a\n", server.client_stanza(ProxyJump="a")]
        with pytest.raises(TransportError, match=r"more than 16 jump hosts lead to .*in a loop: check `ProxyJump`"):
            works(reach(server, config_file=configure(*blocks)))

    def test_the_maximum_number_of_jump_hosts_works(
        self,
        server: Sshd,
        hops: tuple[Sshd, Sshd],
        reach: Reach,
        configure: Configure,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("distflow.transports.ssh.connection._MOST_HOPS", 2)
        stanzas = [*(one.client_stanza() for one in hops), server.client_stanza(ProxyJump="bastion,inner")]
        assert works(reach(server, config_file=configure(*stanzas)))

    def test_one_deadline_applies_to_all_hops_together(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        second.freeze()
        stanzas = [first.client_stanza(), second.client_stanza(), server.client_stanza(ProxyJump="bastion,inner")]
        before = time.monotonic()
        # This is enough for the login at the first hop on a busy machine.
        with pytest.raises(NodeUnreachable, match=r"jump host inner .* within 6 s"):
            reach(server, config_file=configure(*stanzas), connect_timeout_s=6.0).open(["true"])
        assert time.monotonic() - before < 30


class TestProxyCommands:
    """A program of the user carries the connection."""

    def test_a_proxy_command_carries_the_connection_and_ends_with_it(
        self, server: Sshd, reach: Reach, configure: Configure, pipe: str, tmp_path: Path
    ) -> None:
        command = f"sh -c 'echo $$ > {tmp_path / 'pid'}; exec {pipe} %h %p; :'"
        transport = reach(server, config_file=configure(server.client_stanza(ProxyCommand=command)))
        data = os.urandom(1 << 20) * 4
        assert transport.run(["cat"], input=data, timeout_s=60).stdout == data
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
        transport.close()
        wait_until(lambda: not is_alive(pid), 20, "the command has ended")

    def test_ssh_can_be_the_proxy_command(
        self, server: Sshd, make_server: MakeServer, reach: Reach, configure: Configure
    ) -> None:
        first = make_server("bastion", "127.0.1.21")
        command = f"ssh -F {first.client_config} -W [%h]:%p bastion"
        assert works(reach(server, config_file=configure(server.client_stanza(ProxyCommand=command))))

    def test_the_error_of_a_failed_proxy_command_has_its_output(self, server: Sshd, reach: Reach, configure: Configure) -> None:
        command = "sh -c 'echo no way to %h >&2; exit 1'"
        with pytest.raises(NodeUnreachable) as caught:
            works(reach(server, config_file=configure(server.client_stanza(ProxyCommand=command))))
        assert "output of the ProxyCommand:\nno way to 127.0.1.1" in str(caught.value)

    def test_a_proxy_command_that_hangs_is_killed_with_its_children(
        self, server: Sshd, reach: Reach, configure: Configure, tmp_path: Path
    ) -> None:
        command = f"sh -c 'sleep 60 & echo $! > {tmp_path / 'pid'}; wait'"
        config = configure(server.client_stanza(ProxyCommand=command))
        # This is enough to start the command on a busy machine.
        with pytest.raises(NodeUnreachable, match="sent no SSH banner within 3 s"):
            reach(server, config_file=config, connect_timeout_s=3.0).open(["true"])
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not is_alive(pid), 20, "the child of the command has ended")

    def test_proxy_command_none_overrides_later_settings(self, server: Sshd, reach: Reach, configure: Configure) -> None:
        stanza = server.client_stanza(ProxyCommand="none", ProxyJump="none")
        assert works(reach(server, config_file=configure(stanza, "Host *\n  ProxyCommand false\n")))
