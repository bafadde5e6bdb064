"""The OpenSSH configuration: words, patterns, and errors that name their line (``ssh -G`` is asked in integration/ssh)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from distflow.transports.destination import SshDestination
from distflow.transports.sshconfig import SshConfigWrong, matches_list, read_config, split_words
from distflow.transports.sshhost import Hop, SshHost, pick_algorithms, resolve_destination, resolve_hop


def read(text: str, host: str = "gpu1", files: Mapping[str, str] | None = None) -> dict[str, list[tuple[str, ...]]]:
    known = {"/c": text, **(files or {})}
    found = read_config(host, {}, "/c", lambda path: known.get(str(path), ""))
    return {key: [one.words for one in directives] for key, directives in found.items()}


@pytest.fixture
def host(tmp_path: Path) -> object:
    def resolve(text: str, **fields: object) -> SshHost:
        (tmp_path / "config").write_text(text)
        given = {"host": "gpu1", "config_file": str(tmp_path / "config"), **fields}
        return resolve_destination(SshDestination(**given))  # type: ignore[arg-type]

    return resolve


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", ("a", "b")),
        ('"a b" c', ("a b", "c")),
        ("'a \"b' c", ('a "b', "c")),
        (r"a\ b c", ("a b", "c")),
        (r"a\"b", ('a"b',)),
        (r"C:\path", (r"C:\path",)),
        ("a # b", ("a",)),
        ("a#b", ("a#b",)),
        ('pre"in side"post', ("prein sidepost",)),
        ("", ()),
    ],
)
def test_words(text: str, words: tuple[str, ...]) -> None:
    assert split_words(text) == words


def test_patterns() -> None:
    assert matches_list("gpu12", ["gpu*"])
    assert matches_list("gpu1", ["x", "gpu?"])
    assert not matches_list("gpu12", ["gpu?"])
    assert not matches_list("gpu1", ["*", "!gpu1"])
    assert not matches_list("gpu1", ["!other"])
    assert not matches_list("gpu1", ["gpu[1]", "g.u1"])
    assert not matches_list("gpu1", [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Port\n", "/c:1: `Port` has no value"),
        ('\nUser "me\n', "/c:2: a quote is not closed"),
        ("!!\n", "/c:1: this is no `Keyword value`: !!"),
        ("Match localnetwork 10.0.0.0/8\n", "/c:1: `Match localnetwork` is not supported here"),
        ("Host other\nMatch weather sunny\n", "/c:2: `Match weather` is not supported here"),
        ("Match host\n", "/c:1: `Match host` has no value"),
    ],
)
def test_what_is_wrong_names_its_line(text: str, said: str) -> None:
    with pytest.raises(SshConfigWrong) as caught:
        read(text)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Port many\n", "this is no number: many"),
        ("Port 99999\n", "this is no port: 99999"),
        ("Port 0\n", "this is no port: 0"),
        ("ConnectTimeout soon\n", "this is no time: soon"),
        ("HostName %q\n", "`%q` means nothing here"),
        ("ProxyCommand nc %z\n", "`%z` means nothing here"),
        ("IdentityFile ${NOT_SET_AT_ALL}/k\n", "the variable NOT_SET_AT_ALL is not set"),
        ("ProxyJump a:b:c\n", "this is no `[user@]host[:port]`: a:b:c"),
        ("ProxyCommand x\nProxyUseFdpass yes\n", "`ProxyUseFdpass` is not supported here"),
    ],
)
def test_values_that_mean_nothing_name_their_line(text: str, said: str, host: object) -> None:
    with pytest.raises(SshConfigWrong, match=r"config:\d: ") as caught:
        host(text)  # type: ignore[operator]
    assert said in str(caught.value)


def test_includes_that_include_themselves_end(tmp_path: Path) -> None:
    file = tmp_path / "loop"
    file.write_text(f"Include {file}\n")
    with pytest.raises(SshConfigWrong, match="include each other"):
        read_config("gpu1", {}, str(file))


@pytest.mark.parametrize("name", ["-oProxyCommand=evil", "a;b", "$(id)", "`id`", "a b", "a'b"])
def test_names_that_a_shell_could_understand_are_refused(name: str) -> None:
    with pytest.raises(SshConfigWrong, match="cannot be a host's name"):
        resolve_hop(Hop(host=name), SshDestination(host="x", config_file="none"))


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=evil", "a;b", "$(id)", "`id`", "a b", "a'b", "a|b", "a\n", "", "a\\", "${HOME}", "a\x1bb"]
)
def test_users_that_a_shell_could_understand_are_refused_before_any_command_runs(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f'Match exec "touch {tmp_path}/ran; : %r"\n  ProxyCommand true %r\n')
    with pytest.raises(SshConfigWrong, match="cannot be a user's name"):
        resolve_hop(Hop(host="gpu1", user=name), SshDestination(host="x", config_file=str(config)))
    assert not (tmp_path / "ran").exists()


def test_users_of_a_domain_are_users() -> None:
    found = resolve_hop(Hop(host="gpu1", user="LAB\\ada.l-9@lab"), SshDestination(host="x", config_file="none"))
    assert found.user == "LAB\\ada.l-9@lab"


def test_defaults(host: object) -> None:
    found: SshHost = host("")  # type: ignore[operator]
    assert (found.hostname, found.port, found.connect_timeout_s, found.keepalive_s) == ("gpu1", 22, 10.0, 15.0)
    assert found.host_key_policy == "strict"
    assert found.known_hosts_files[0] == str(Path("~/.ssh/known_hosts").expanduser())
    assert str(Path("~/.ssh/id_ed25519").expanduser()) in found.identity_files
    assert not found.has_own_identities
    assert found.identity_agent is None


def test_what_the_node_says_wins(host: object) -> None:
    text = "Port 1\nUser a\nIdentityFile /a\nConnectTimeout 1\nStrictHostKeyChecking no\nUserKnownHostsFile /a\n"
    found: SshHost = host(  # type: ignore[operator]
        text, port=2, user="b", identity_file="/b", connect_timeout_s=2.0, host_key_policy="strict", known_hosts_files=("/b",)
    )
    assert (found.port, found.user, found.identity_files, found.connect_timeout_s) == (2, "b", ("/b", "/a"), 2.0)
    assert (found.host_key_policy, found.known_hosts_files) == ("strict", ("/b",))
    assert host(text).host_key_policy == "accept-new"  # type: ignore[operator]


def test_jumps(host: object) -> None:
    found: SshHost = host("ProxyJump a,me@b:2200,ssh://c:22,[fe80::1]:23\n")  # type: ignore[operator]
    assert found.proxy_jump == (
        Hop(host="a"), Hop(host="b", port=2200, user="me"), Hop(host="c", port=22), Hop(host="fe80::1", port=23),
    )  # fmt: skip


def test_names_in_known_hosts(host: object) -> None:
    assert host("").key_name == "gpu1"  # type: ignore[operator]
    assert host("Port 2200").key_name == "[gpu1]:2200"  # type: ignore[operator]
    assert host("Port 2200\nHostKeyAlias x").key_name == "x"  # type: ignore[operator]


def test_algorithms() -> None:
    known = ("a1", "a2", "b")
    assert pick_algorithms("", known) == known
    assert pick_algorithms("b,a*", known) == ("b", "a1", "a2")
    assert pick_algorithms("+z", known) == known
    assert pick_algorithms("-a*", known) == ("b",)
    assert pick_algorithms("^b", known) == ("b", "a1", "a2")
    assert pick_algorithms("z", known) == ()
