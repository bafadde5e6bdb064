"""Our reading of ``ssh_config`` against OpenSSH's own: ``ssh -G`` prints what it would do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from distflow.transports.destination import SshDestination
from distflow.transports.sshhost import SshHost, resolve_destination

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(shutil.which("ssh") is None, reason="apt-get install openssh-client")]

CASES = {
    "first value wins": "Host gpu1\n  Port 1\n  User a\nHost gpu*\n  Port 2\n  User b\n  HostName h.example\n",
    "case, equals and quotes": 'host gpu1\n\tPORT=2201\n  hostname = "10.0.0.1"\nUSER   "me"\n',
    "comments behind values": "Host gpu1 # mine\n  Port 2202 # odd\n  User me#you\n",
    "negation": "Host * !gpu1\n  Port 1\nHost *\n  Port 3\n",
    "question marks": "Host gpu?\n  Port 4\n",
    "patterns are no regular expressions": "Host gpu[1]\n  Port 9\nHost g.u1\n  Port 9\nHost gpu1\n  Port 5\n",
    "identities add up": "IdentityFile ~/a\nHost gpu1\n  IdentityFile ~/b\n  IdentityFile ~/a\nHost x\n  IdentityFile ~/c\n",
    "tokens": "Host gpu1\n  HostName %h.example\n  User u\n  Port 7\n  IdentityFile ~/k/%r@%h:%p-%n-%u-%i-%%\n",
    "environment": "Host gpu1\n  IdentityFile ${HOME}/k\n  UserKnownHostsFile ${HOME}/x ~/y\n",
    "match host sees HostName": "HostName big.org\nMatch host big.*\n  Port 8\nMatch originalhost gpu1\n  User o\n",
    "match negated": "Match !host gpu1\n  Port 1\nMatch host gpu1,other\n  Port 2\n",
    "match user sees User": "Host gpu1\n  User ann\nMatch user bob\n  Port 1\nMatch user ann\n  Port 2\n",
    "match local user": "Match localuser nobody\n  Port 1\nMatch all\n  Port 2\n",
    "match exec": 'Match exec "test %h = gpu1"\n  Port 1\nMatch exec false\n  User x\nMatch exec true\n  User y\n',
    "match exec runs only where the rest holds": "Match host other exec \"touch ran\"\n  Port 1\nHost *\n  Port 2\n",
    "match final": "Match final\n  Port 9\n  User late\nHost gpu1\n  User early\n",
    "match all and final": "Host gpu1\n  Port 1\nMatch final all\n  HostName later.example\n  User late\n",
    "include in a block that does not hold": "Host other\n  Include more\n  Port 5\nHost gpu1\n  User me\n",
    "include in a block that holds": "Host gpu1\n  Include more\n  Port 5\nHost *\n  Port 6\n",
    "include at the top": "Include more\nPort 5\n",
    "include with globs, in order": "Include parts/*.conf missing/*\n",
    "include keeps the block": "Host gpu1\n  Include other_only\n  User still\n",
    "proxy jump first": "Host gpu1\n  ProxyJump a,b@c:22\n  ProxyCommand nc %h %p\n",
    "proxy command first": "Host gpu1\n  ProxyCommand nc -x \"%n\" %h %p # kept\n  ProxyJump a\n",
    "proxy none": "Host gpu1\n  ProxyCommand none\n  ProxyJump none\nHost *\n  ProxyJump a\n",
    "known hosts": "Host gpu1\n  UserKnownHostsFile ~/one \"~/two words\"\n  GlobalKnownHostsFile /three\n  HostKeyAlias me\n",
    "times": "Host gpu1\n  ConnectTimeout 1m30s\n  ServerAliveInterval 7\n  ServerAliveCountMax 2\n",
    "host keys": "StrictHostKeyChecking accept-new\nHashKnownHosts yes\nIdentitiesOnly yes\nAddressFamily inet\n",
    "agents": "Host gpu1\n  IdentityAgent ~/agent.sock\n  CertificateFile ~/x-cert.pub\n",
}  # fmt: skip


def openssh(config: Path) -> dict[str, list[str]]:
    done = subprocess.run(["ssh", "-G", "-F", str(config), "gpu1"], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def ours(config: Path) -> SshHost:
    return resolve_destination(SshDestination(host="gpu1", config_file=str(config)))


@pytest.mark.parametrize("case", sorted(CASES))
def test_we_read_as_openssh_does(case: str, tmp_path: Path) -> None:
    # ssh takes the home of the user database, not HOME: both mean the same place here.
    home = Path.home()
    real_home = subprocess.run(["sh", "-c", "eval echo ~$(id -un)"], capture_output=True, text=True, check=True).stdout.strip()
    included = {
        "more": "User included\nHost gpu1\n  HostName from.include\nHost other\n  Port 77\n",
        "other_only": "Host other\n  Port 78\n",
        "parts/b.conf": "User second\n",
        "parts/a.conf": "User first\n",
    }
    for name, text in included.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    text = CASES[case]
    for name in ("more", "other_only", "parts", "missing"):
        text = text.replace(f"Include {name}", f"Include {tmp_path}/{name}")
    config = tmp_path / "config"
    config.write_text(text)
    theirs, host = openssh(config), ours(config)

    def path(text: str) -> str:
        return text.replace(real_home, "~H").replace(str(home), "~H").replace("~/", "~H/")

    assert host.hostname == theirs["hostname"][0]
    assert host.port == int(theirs["port"][0])
    assert host.user == theirs["user"][0]
    assert host.identities_only == (theirs["identitiesonly"] == ["yes"])
    assert host.hash_known_hosts == (theirs["hashknownhosts"] == ["yes"])
    assert host.address_family == theirs["addressfamily"][0]
    assert (host.host_key_alias or "none") == theirs.get("hostkeyalias", ["none"])[0]
    assert host.connect_timeout_s == {"none": 10.0}.get(theirs["connecttimeout"][0]) or float(theirs["connecttimeout"][0])
    assert host.host_key_policy == ("accept-new" if theirs["stricthostkeychecking"] == ["accept-new"] else "strict")
    jumps = ",".join(
        f"{hop.user + '@' if hop.user else ''}{hop.host}{f':{hop.port}' if hop.port else ''}" for hop in host.proxy_jump
    )
    assert jumps == theirs.get("proxyjump", [""])[0].replace("none", "")
    known = [*theirs["userknownhostsfile"][0].split(), *theirs["globalknownhostsfile"][0].split()]
    assert [path(file) for one in host.known_hosts_files for file in one.split()] == [path(one) for one in known]
    if host.has_own_identities:
        # `ssh -G` leaves most tokens as they are.
        if "%" not in theirs["identityfile"][0] and "$" not in theirs["identityfile"][0]:
            assert [path(one) for one in host.identity_files] == [path(one) for one in theirs["identityfile"]]
        else:
            assert len(host.identity_files) == len(theirs["identityfile"])
    assert [path(one) for one in host.certificate_files] == [path(one) for one in theirs.get("certificatefile", [])]
    if "identityagent" in theirs:
        assert path(str(host.identity_agent)) == path(theirs["identityagent"][0])
    assert (host.proxy_command is None) == ("proxycommand" not in theirs or theirs["proxycommand"] == ["none"])


def test_tokens_are_expanded(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(CASES["tokens"])
    host = ours(config)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    number = subprocess.run(["id", "-u"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    assert host.hostname == "gpu1.example"
    assert host.identity_files == (f"{Path.home()}/k/u@gpu1.example:7-gpu1-{user}-{number}-%",)
