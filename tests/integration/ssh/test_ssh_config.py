"""The OpenSSH configuration as ``ssh -G`` reads it, and as paramiko does where no ``ssh`` is installed."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.ssh import config as sshconfig
from distflow.transports.ssh.config import Hop, SshConfigError, SshDestination, SshHost, resolve_destination

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(shutil.which("ssh") is None, reason="apt-get install openssh-client")]

ACCOUNT = pwd.getpwuid(os.getuid())
INCLUDED = {
    "more": "User included\nHost gpu1\n  HostName from.include\nHost other\n  Port 77\n",
    "other_only": "Host other\n  Port 78\n",
    "parts/b.conf": "User second\n",
    "parts/a.conf": "User first\n",
}

# The configuration, its settings for gpu1, and whether paramiko alone reads the same settings.
CASES: dict[str, tuple[str, dict[str, object], bool]] = {
    "first value wins": (
        "Host gpu1\n  Port 1\n  User a\nHost gpu*\n  Port 2\n  User b\n  HostName h.example\n",
        {"port": 1, "user": "a", "hostname": "h.example"}, True,
    ),
    "case, equals and quotes": (
        'host gpu1\n\tPORT=2201\n  hostname = "10.0.0.1"\nUSER   "me"\n',
        {"port": 2201, "hostname": "10.0.0.1", "user": "me"}, True,
    ),
    "comments behind values": ("Host gpu1 # mine\n  Port 2202 # odd\n  User me#you\n", {"port": 2202, "user": "me#you"}, False),
    "negation": ("Host * !gpu1\n  Port 1\nHost *\n  Port 3\n", {"port": 3}, True),
    "question marks": ("Host gpu?\n  Port 4\n", {"port": 4}, True),
    "identities add up": (
        "IdentityFile /a\nHost gpu1\n  IdentityFile /b\n  IdentityFile /a\nHost x\n  IdentityFile /c\n",
        {"identity_files": ("/a", "/b"), "has_own_identities": True}, True,
    ),
    "no identities": ("IdentityFile none\n", {"identity_files": (), "has_own_identities": True}, True),
    "tokens": (
        "Host gpu1\n  HostName %h.example\n  User u\n  Port 7\n  IdentityFile ~/k/%r@%h:%p-%n-%u-%i-%%\n",
        {"hostname": "gpu1.example",
         "identity_files": (f"{{home}}/k/u@gpu1.example:7-gpu1-{ACCOUNT.pw_name}-{ACCOUNT.pw_uid}-%",)}, False,
    ),
    "environment": ("Host gpu1\n  IdentityFile ${HOME}/k\n", {"identity_files": ("{home}/k",)}, True),
    "match host sees HostName": (
        "HostName big.org\nMatch host big.*\n  Port 8\nMatch originalhost gpu1\n  User o\n", {"port": 8, "user": "o"}, True,
    ),
    "match negated": ("Match !host gpu1\n  Port 1\nMatch host gpu1,other\n  Port 2\n", {"port": 2}, True),
    "match user sees User": ("Host gpu1\n  User ann\nMatch user bob\n  Port 1\nMatch user ann\n  Port 2\n", {"port": 2}, True),
    "match exec": ('Match exec "test %h = gpu1"\n  Port 1\nMatch exec false\n  User x\nMatch exec true\n  User y\n',
                   {"port": 1, "user": "y"}, False),
    "match final": ("Match final\n  Port 9\n  User late\nHost gpu1\n  User early\n", {"port": 9, "user": "early"}, False),
    "include in a block that does not apply": (
        "Host other\n  Include more\n  Port 5\nHost gpu1\n  User me\n", {"port": 22, "user": "me", "hostname": "gpu1"}, False,
    ),
    "include in a block that applies": (
        "Host gpu1\n  Include more\n  Port 5\nHost *\n  Port 6\n",
        {"port": 5, "user": "included", "hostname": "from.include"}, False,
    ),
    "include with globs, in order": ("Include parts/*.conf missing/*\n", {"user": "first"}, False),
    "include keeps the block": ("Host gpu1\n  Include other_only\n  User still\n", {"user": "still", "port": 22}, False),
    "proxy jump first": (
        "Host gpu1\n  ProxyJump a,b@c:22\n  ProxyCommand nc %h %p\n",
        {"proxy_jump": (Hop(host="a"), Hop(host="c", user="b", port=22)), "proxy_command": None}, False,
    ),
    "proxy command first": (
        'Host gpu1\n  ProxyCommand nc -x "%n" %h %p\n  ProxyJump a\n',
        {"proxy_command": 'nc -x "gpu1" gpu1 22', "proxy_jump": ()}, False,
    ),
    "proxy none": ("Host gpu1\n  ProxyCommand none\n  ProxyJump none\nHost *\n  ProxyJump a\n",
                   {"proxy_command": None, "proxy_jump": ()}, True),
    "jump hosts": (
        "ProxyJump a,me@b:2200,ssh://c:22,[fe80::1]:23\n",
        {"proxy_jump": (
            Hop(host="a"), Hop(host="b", port=2200, user="me"), Hop(host="c", port=22), Hop(host="fe80::1", port=23))}, True,
    ),
    "known hosts": (
        "Host gpu1\n  UserKnownHostsFile /one /two\n  GlobalKnownHostsFile /three\n  HostKeyAlias me\n",
        {"known_hosts_files": ("/one", "/two", "/three"), "key_name": "me"}, True,
    ),
    "no known hosts": ("UserKnownHostsFile none\nGlobalKnownHostsFile none\n", {"known_hosts_files": ()}, True),
    "times": ("Host gpu1\n  ConnectTimeout 1m30s\n  ServerAliveInterval 7\n  ServerAliveCountMax 2\n",
              {"connect_timeout_s": 90.0, "keepalive_s": 7.0, "keepalive_count": 2}, False),
    "host keys": (
        "StrictHostKeyChecking accept-new\nHashKnownHosts yes\nIdentitiesOnly yes\nAddressFamily inet\nRevokedHostKeys /r\n",
        {"host_key_policy": "accept-new", "hash_known_hosts": True, "identities_only": True, "address_family": "inet",
         "revoked_host_keys": ("/r",)}, True,
    ),
    "strict checking off": ("StrictHostKeyChecking no\n", {"host_key_policy": "accept-new"}, True),
    "agents": ("Host gpu1\n  IdentityAgent /agent.sock\n  CertificateFile ~/x-cert.pub\n",
               {"identity_agent": "/agent.sock", "certificate_files": ("{home}/x-cert.pub",)}, True),
    "algorithms": ("Ciphers aes256-ctr,aes128-ctr\nBindAddress 127.0.0.1\n",
                   {"ciphers": "aes256-ctr,aes128-ctr", "macs": "", "bind_address": "127.0.0.1"}, True),
    "defaults": (
        "",
        {"hostname": "gpu1", "port": 22, "user": ACCOUNT.pw_name, "connect_timeout_s": 10.0, "keepalive_s": 15.0,
         "keepalive_count": 3, "host_key_policy": "strict", "has_own_identities": False, "ciphers": "", "macs": "",
         "kex_algorithms": "", "host_key_algorithms": "", "key_name": "gpu1", "address_family": "any"}, True,
    ),
    "key name with a port": ("Port 2200\n", {"key_name": "[gpu1]:2200"}, True),
}  # fmt: skip

Resolve = Callable[..., SshHost]


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    """Write a configuration and return its settings for gpu1."""

    def resolve(text: str, **fields: Any) -> SshHost:
        for name, included in INCLUDED.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(included)
        for name in ("more", "other_only", "parts", "missing"):
            text = text.replace(f"Include {name}", f"Include {tmp_path}/{name}")
        (tmp_path / "config").write_text(text)
        given = {"host": "gpu1", "config_file": str(tmp_path / "config"), **fields}
        return resolve_destination(SshDestination(**given))

    return resolve


@pytest.fixture
def without_openssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH without `ssh`."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def check(host: SshHost, expected: dict[str, object]) -> None:
    def filled(value: object) -> object:
        if isinstance(value, tuple) and all(isinstance(one, str) for one in value):
            return tuple(one.replace("{home}", str(Path.home())) for one in value)
        return value

    assert {name: getattr(host, name) for name in expected} == {name: filled(value) for name, value in expected.items()}


@pytest.mark.parametrize("case", sorted(CASES))
def test_openssh_reads_the_configuration(case: str, resolve: Resolve) -> None:
    text, expected, _ = CASES[case]
    check(resolve(text), expected)


@pytest.mark.parametrize("case", sorted(name for name, (_, _, is_simple) in CASES.items() if is_simple))
def test_paramiko_alone_reads_simple_configurations(case: str, resolve: Resolve, without_openssh: None) -> None:
    text, expected, _ = CASES[case]
    check(resolve(text), expected)


@pytest.mark.parametrize(
    "text",
    ["Host other\n  Include more\n", "Match exec true\n  Port 1\n", "Port 2 # odd\n", "Match final\n  Port 9\n",
     "Ciphers -aes*\n", "Ciphers=^aes256-ctr\n"],
)  # fmt: skip
def test_options_that_need_openssh_are_refused_with_their_line(text: str, resolve: Resolve, without_openssh: None) -> None:
    with pytest.raises(SshConfigError, match=r"config line \d: only OpenSSH understands `.+`; install it"):
        resolve("# a comment\n\n" + text)


def test_without_openssh_added_algorithms_are_ignored(resolve: Resolve, without_openssh: None) -> None:
    assert resolve("HostKeyAlgorithms +ssh-rsa\n").host_key_algorithms == ""


def test_without_openssh_the_configuration_of_the_user_is_read(without_openssh: None) -> None:
    assert resolve_destination(SshDestination(host="gpu1")).port == 22
    (Path.home() / ".ssh").mkdir(parents=True)
    (Path.home() / ".ssh" / "config").write_text("Port 2299\n")
    assert resolve_destination(SshDestination(host="gpu1")).port == 2299
    with pytest.raises(SshConfigError, match="/no/such: No such file"):
        resolve_destination(SshDestination(host="gpu1", config_file="/no/such"))


@pytest.mark.parametrize("text", ["Port many\n", "Port 99999\n", "Match weather sunny\n", 'User "me\n', "NoSuchKeyword x\n"])
def test_an_error_of_ssh_names_its_line(text: str, resolve: Resolve) -> None:
    with pytest.raises(SshConfigError, match=r"config:? line 2: "):
        resolve("\n" + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HostName %q\n", "unknown key %q"),
        ("ProxyCommand nc %z\n", "`ProxyCommand nc %z`: distflow does not support the token `%z`"),
        ("IdentityFile ${NOT_SET_AT_ALL}/k\n", "the environment variable `NOT_SET_AT_ALL` is not set"),
        ("ProxyJump a:b:c\n", 'Invalid ProxyJump "a:b:c"'),
        ("ProxyCommand x\nProxyUseFdpass yes\n", "`ProxyUseFdpass yes` is not supported; use `ProxyJump`"),
    ],
)
def test_invalid_values_are_named(text: str, message: str, resolve: Resolve) -> None:
    with pytest.raises(SshConfigError) as caught:
        resolve(text)
    assert message in str(caught.value)


def test_an_include_of_itself_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "loop"
    file.write_text(f"Include {file}\n")
    with pytest.raises(SshConfigError, match="Too many recursive configuration includes"):
        resolve_destination(SshDestination(host="gpu1", config_file=str(file)))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SshConfigError, match="Can't open user config file"):
        resolve_destination(SshDestination(host="gpu1", config_file=str(tmp_path / "none")))


def test_a_match_exec_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, resolve: Resolve, tmp_path: Path) -> None:
    monkeypatch.setattr(sshconfig, "_READ_TIMEOUT_S", 2.0)
    with pytest.raises(SshConfigError, match="did not finish within 2 s; a command of `Match exec` may hang"):
        resolve(f'Match exec "echo $$ > {tmp_path}/pid; sleep 600; true"\n  Port 1\n')
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), 20, "the command has ended")


def test_the_configuration_and_its_paths_follow_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host gpu1\n  Port 2288\n  IdentityFile ~/k\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    host = resolve_destination(SshDestination(host="gpu1"))
    assert (host.port, host.identity_files) == (2288, (f"{tmp_path}/k",))
    assert host.known_hosts_files[0] == f"{tmp_path}/.ssh/known_hosts"


def test_the_fields_of_a_node_override_the_configuration(resolve: Resolve) -> None:
    text = "Port 1\nUser a\nIdentityFile /a\nConnectTimeout 1\nStrictHostKeyChecking no\nUserKnownHostsFile /a\n"
    given: dict[str, Any] = {
        "port": 2, "user": "b", "connect_timeout_s": 2.0, "host_key_policy": "strict", "known_hosts_files": ("/b",),
    }  # fmt: skip
    check(resolve(text, identity_file="/b", **given), {**given, "identity_files": ("/b", "/a")})


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=evil", "a;b", "$(id)", "`id`", "a b", "a'b", "a|b", "a\n", "", "a\\", "${HOME}", "a\x1bb"]
)
def test_user_names_with_shell_syntax_are_refused_before_a_command_runs(name: str, resolve: Resolve, tmp_path: Path) -> None:
    with pytest.raises(SshConfigError, match="is not a valid user name"):
        resolve(f'Match exec "touch {tmp_path}/ran; : %r"\n  ProxyCommand true %r\n', user=name)
    assert not (tmp_path / "ran").exists()
