"""Names that could reach a shell, and lists of algorithms. What `ssh` reads itself is tested in integration/ssh."""

from __future__ import annotations

import pytest

from distflow.transports.ssh.config import Hop, SshConfigError, SshDestination, pick_algorithms, resolve_hop

NOWHERE = SshDestination(host="x", config_file="none")


@pytest.mark.parametrize("name", ["-oProxyCommand=evil", "a;b", "$(id)", "`id`", "a b", "a'b", ""])
def test_host_names_that_a_shell_could_understand_are_refused(name: str) -> None:
    with pytest.raises(SshConfigError, match="is not a valid host name"):
        resolve_hop(Hop(host=name), NOWHERE)


def test_user_names_may_contain_a_domain() -> None:
    assert resolve_hop(Hop(host="gpu1", user="LAB\\ada.l-9@lab"), NOWHERE).user == "LAB\\ada.l-9@lab"


def test_no_file_is_read_when_none_is_asked_for() -> None:
    found = resolve_hop(Hop(host="GPU1", port=7), NOWHERE)
    assert (found.hostname, found.port, found.identity_agent, found.has_own_identities) == ("GPU1", 7, None, False)


def test_algorithms() -> None:
    known = ("a1", "a2", "b")
    assert pick_algorithms("", known) == known
    assert pick_algorithms("b,x,a1", known) == ("b", "a1")
    assert pick_algorithms("z", known) == known
