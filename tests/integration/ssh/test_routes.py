"""Ways to a host, and ways to fail on the way: each named, each within its time."""

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
    """A port where somebody says ``greeting`` and nothing else; ``None``: hangs up at once."""
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
def black_hole() -> Iterator[int]:
    """A port whose packets vanish, without root: its queue is full, so the kernel drops who knocks."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield int(server.getsockname()[1])


def to(port: int, **fields: object) -> SshTransport:
    given = {"host": "127.0.0.1", "port": port, "user": "me", "config_file": "none", "connect_timeout_s": 2.0, **fields}
    return SshTransport("n1", SshDestination(**given))  # type: ignore[arg-type]


def failure(transport: SshTransport, within_s: float = 30.0) -> str:
    """What is said when the node cannot be reached, within the time."""
    before = time.monotonic()
    with pytest.raises(NodeUnreachable) as caught:
        transport.open(["true"])
    assert time.monotonic() - before < within_s
    transport.close()
    assert caught.value.node == "n1"
    return str(caught.value)


def test_a_closed_port() -> None:
    port = free_port()
    assert failure(to(port)).startswith(f"n1: me@127.0.0.1:{port}: nothing listens there (connection refused)\n")


def test_a_name_that_has_no_address() -> None:
    said = failure(to(22, host="no-such-host.invalid"), within_s=30)
    assert said.startswith("n1: me@no-such-host.invalid:22")
    assert any(text in said for text in ("this name has no address", "this name cannot be looked up", "did not answer within"))


def test_a_black_hole_ends_with_the_connect_timeout() -> None:
    with black_hole() as port:
        assert f"n1: me@127.0.0.1:{port} did not answer within 1 s" in failure(to(port, connect_timeout_s=1.0))


def test_the_connect_timeout_of_the_configuration_holds(configure: Configure) -> None:
    with black_hole() as port:
        config = configure("Host *\n  ConnectTimeout 1\n")
        assert "did not answer within 1 s" in failure(to(port, config_file=config, connect_timeout_s=None))


def test_a_port_where_the_server_is_silent() -> None:
    with listener(b"") as port:
        said = failure(to(port, connect_timeout_s=1.0))
    assert f"n1: me@127.0.0.1:{port} sent no SSH banner within 1 s" in said


def test_a_server_that_stops_in_the_key_exchange() -> None:
    with listener(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        said = failure(to(port, connect_timeout_s=3.0))
    assert f"n1: me@127.0.0.1:{port} did not finish the key exchange within 3 s" in said


def test_a_port_where_somebody_hangs_up() -> None:
    with listener(None) as port:
        assert f"n1: me@127.0.0.1:{port} closed the connection before it sent" in failure(to(port))


def test_a_port_of_something_else() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n" * 200) as port:
        assert f"n1: me@127.0.0.1:{port} is not an SSH server\ncheck the port {port}" in failure(to(port))


def test_a_server_with_only_insecure_algorithms(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(options={"Ciphers": "chacha20-poly1305@openssh.com"})
    with pytest.raises(NodeUnreachable, match=r"gpu9: .*no common algorithm: .*cipher"):
        works(reach(server))


def test_a_frozen_server(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    server.freeze()
    with pytest.raises(NodeUnreachable, match="sent no SSH banner within 2 s"):
        reach(server, connect_timeout_s=2.0).open(["true"])
    server.thaw()
    assert works(reach(server))


def test_a_failure_prints_nothing_and_holds_no_process_up() -> None:
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
        transport = to(port, connect_timeout_s=30.0)
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


def test_a_configuration_that_cannot_be_understood_names_its_line(server: Sshd, reach: Reach, configure: Configure) -> None:
    config = configure("Match weather sunny\n  User x\n")
    with pytest.raises(
        TransportError, match=r"gpu1: cannot use the SSH configuration: Unsupported Match attribute weather\n.*config line 1: "
    ):
        reach(server, config_file=config).open(["true"])


def test_aliases_includes_and_the_home_configuration(server: Sshd) -> None:
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

    def test_two_hops_each_with_its_own_configuration(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        stanzas = [first.client_stanza(), second.client_stanza(), server.client_stanza(ProxyJump="bastion,inner")]
        transport = reach(server, config_file=configure(*stanzas))
        assert works(transport)
        assert transport.reached_address is None
        # sshd of the last one was reached from the second, that from the first.
        assert "Accepted publickey" in first.log.read_text()
        assert "Accepted publickey" in second.log.read_text()
        data = os.urandom(1 << 20) * 4
        assert transport.run(["cat"], input=data, timeout_s=60).stdout == data
        transport.close()
        wait_until(lambda: first.connections() == 0 and second.connections() == 0, 20, "nothing is left on the way")

    def test_a_jump_host_with_a_jump_host_of_its_own(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        stanzas = [first.client_stanza(), second.client_stanza(ProxyJump="bastion"), server.client_stanza(ProxyJump="inner")]
        assert works(reach(server, config_file=configure(*stanzas)))
        assert "Accepted publickey" in first.log.read_text()

    def test_a_hop_that_is_named_by_address(
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
        # From here its keys cannot be scanned.
        assert "ssh-keyscan" not in str(caught.value)

    def test_a_hop_that_may_not_forward_says_so(
        self, server: Sshd, make_server: MakeServer, reach: Reach, configure: Configure
    ) -> None:
        first = make_server("closed", "127.0.1.23", options={"AllowTcpForwarding": "no"})
        config = configure(first.client_stanza(), server.client_stanza(ProxyJump="closed"))
        with pytest.raises(NodeUnreachable, match=r"jump host closed \(.*\) does not allow forwarding to"):
            works(reach(server, config_file=config))

    def test_many_nodes_behind_one_jump_host_are_all_reached(
        self, server: Sshd, make_server: MakeServer, reach: Reach, configure: Configure
    ) -> None:
        # It drops new connections while ten others are not logged in yet.
        bastion = make_server("bastion", "127.0.1.8", options={"MaxStartups": "10:100:10"})
        config = configure(bastion.client_stanza(), server.client_stanza(ProxyJump="bastion"))
        transports = [reach(server, config_file=config) for _ in range(24)]
        outcomes = fan_out(transports, lambda one: one.run(["true"], timeout_s=60).exit_code)
        assert [str(one.error or one.value) for one in outcomes] == ["0"] * 24

    def test_jump_hosts_that_lead_to_each_other_end(self, server: Sshd, reach: Reach, configure: Configure) -> None:
        blocks = ["Host a\n  ProxyJump b\n", "Host b\n  ProxyJump a\n", server.client_stanza(ProxyJump="a")]
        with pytest.raises(TransportError, match="more than 16 jump hosts, perhaps in a loop"):
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

    def test_one_deadline_holds_for_the_whole_way(
        self, server: Sshd, hops: tuple[Sshd, Sshd], reach: Reach, configure: Configure
    ) -> None:
        first, second = hops
        second.freeze()
        stanzas = [first.client_stanza(), second.client_stanza(), server.client_stanza(ProxyJump="bastion,inner")]
        before = time.monotonic()
        # Long enough for a busy machine to log in at the first one.
        with pytest.raises(NodeUnreachable, match=r"jump host inner .* within 6 s"):
            reach(server, config_file=configure(*stanzas), connect_timeout_s=6.0).open(["true"])
        assert time.monotonic() - before < 30


class TestProxyCommands:
    """A program of the user's in between."""

    def test_one_carries_the_connection_and_ends_with_it(
        self, server: Sshd, reach: Reach, configure: Configure, pipe: str, tmp_path: Path
    ) -> None:
        command = f"sh -c 'echo $$ > {tmp_path / 'pid'}; exec {pipe} %h %p; :'"
        transport = reach(server, config_file=configure(server.client_stanza(ProxyCommand=command)))
        data = os.urandom(1 << 20) * 4
        assert transport.run(["cat"], input=data, timeout_s=60).stdout == data
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
        transport.close()
        wait_until(lambda: not is_alive(pid), 20, "the command is gone")

    def test_ssh_itself_can_be_one(self, server: Sshd, make_server: MakeServer, reach: Reach, configure: Configure) -> None:
        first = make_server("bastion", "127.0.1.21")
        command = f"ssh -F {first.client_config} -W [%h]:%p bastion"
        assert works(reach(server, config_file=configure(server.client_stanza(ProxyCommand=command))))

    def test_one_that_fails_is_named_with_its_words(self, server: Sshd, reach: Reach, configure: Configure) -> None:
        command = "sh -c 'echo no way to %h >&2; exit 1'"
        with pytest.raises(NodeUnreachable) as caught:
            works(reach(server, config_file=configure(server.client_stanza(ProxyCommand=command))))
        assert "output of the ProxyCommand:\nno way to 127.0.1.1" in str(caught.value)

    def test_one_that_hangs_is_ended_with_all_it_started(
        self, server: Sshd, reach: Reach, configure: Configure, tmp_path: Path
    ) -> None:
        command = f"sh -c 'sleep 60 & echo $! > {tmp_path / 'pid'}; wait'"
        config = configure(server.client_stanza(ProxyCommand=command))
        # Long enough for a busy machine to start it.
        with pytest.raises(NodeUnreachable, match="sent no SSH banner within 3 s"):
            reach(server, config_file=config, connect_timeout_s=3.0).open(["true"])
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not is_alive(pid), 20, "what the command started is gone")

    def test_none_means_none(self, server: Sshd, reach: Reach, configure: Configure) -> None:
        stanza = server.client_stanza(ProxyCommand="none", ProxyJump="none")
        assert works(reach(server, config_file=configure(stanza, "Host *\n  ProxyCommand false\n")))
