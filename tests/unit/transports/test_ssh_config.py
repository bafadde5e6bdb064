"""Names of hosts and users, lists of algorithms, and name look-ups. tests/integration/ssh tests the rest."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from distflow.errors import NodeUnreachable
from distflow.transports.ssh import load_ssh
from distflow.transports.ssh.config import Hop, SshConfigError, SshDestination, pick_algorithms, resolve_hop
from distflow.transports.ssh.sockets import unknown_names

NOWHERE = SshDestination(host="x", config_file="none")


@pytest.mark.parametrize("name", ["-oProxyCommand=evil", "a;b", "$(id)", "`id`", "a b", "a'b", ""])
def test_host_names_with_shell_syntax_are_refused(name: str) -> None:
    with pytest.raises(SshConfigError, match="is not a valid host name"):
        resolve_hop(Hop(host=name), NOWHERE)


def test_user_names_may_contain_a_domain() -> None:
    assert resolve_hop(Hop(host="gpu1", user="LAB\\ada.l-9@lab"), NOWHERE).user == "LAB\\ada.l-9@lab"


def test_no_file_is_read_with_the_config_file_none() -> None:
    found = resolve_hop(Hop(host="GPU1", port=7), NOWHERE)
    assert (found.hostname, found.port, found.identity_agent, found.has_own_identities) == ("GPU1", 7, None, False)


def test_only_supported_algorithms_are_picked() -> None:
    known = ("a1", "a2", "b")
    assert pick_algorithms("", known) == known
    assert pick_algorithms("b,x,a1", known) == ("b", "a1")
    assert pick_algorithms("z", known) == known


def test_only_names_without_a_dns_entry_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host alias\n  HostName 127.0.0.1\nHost wrong\n  HostName gone.example\nHost inner*\n  HostName gone.example\n"
        "Host inner1\n  ProxyJump gone.example\nHost inner2\n  ProxyCommand nc %h %p\n"
    )
    looked_up = set()

    def look_up(name: str, *_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        looked_up.add(name)
        if name == "127.0.0.1":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 22))]
        raise socket.gaierror(socket.EAI_AGAIN if name == "later" else socket.EAI_NONAME, "no")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    hosts = ["alias", "wrong", "inner1", "inner2", "later", "gpu9", "bad;name"]
    found = unknown_names([SshDestination(host=host, config_file=str(config)) for host in hosts])
    assert found == [None, "gone.example", None, None, None, "gpu9", None]
    assert looked_up == {"127.0.0.1", "gone.example", "later", "gpu9"}


def test_a_name_look_up_without_an_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: is_over.wait(60) and [])
    transport = load_ssh()("gpu1", SshDestination(host="gpu1.lab", user="u", config_file="none", connect_timeout_s=0.3))
    with pytest.raises(NodeUnreachable, match=r"cannot be looked up \(no answer within 0\.3 s\)") as caught:
        transport.run(["true"], timeout_s=60.0)
    assert "name servers" in caught.value.hint
    is_over.set()
    transport.close()
