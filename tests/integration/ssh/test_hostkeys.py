"""Host keys of a real sshd with the known_hosts files that users have."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.errors import HostKeyMismatch, HostKeyUnknown, TransportError
from distflow.testing.sshd import Sshd, make_key
from distflow.transports.ssh.transport import SshTransport
from integration.ssh.conftest import MakeServer, Reach

pytestmark = pytest.mark.ssh


def works(transport: SshTransport) -> bool:
    return transport.run(["echo", "in"], timeout_s=60).stdout == b"in\n"


def fingerprint(key: Path) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.split()[1]


def public(key: Path) -> str:
    return " ".join(key.with_name(f"{key.name}.pub").read_text().split()[:2])


@pytest.fixture
def known(tmp_path: Path) -> Callable[[str], dict[str, tuple[str, ...]]]:
    """Write a known_hosts file, as a field of ``SshDestination``."""

    def write(text: str) -> dict[str, tuple[str, ...]]:
        (tmp_path / "known_hosts").write_text(text)
        return {"known_hosts_files": (str(tmp_path / "known_hosts"),)}

    return write


Known = Callable[[str], dict[str, tuple[str, ...]]]


def test_hashed_names_are_found(server: Sshd, reach: Reach, known: Known, tmp_path: Path) -> None:
    fields = known("".join(server.known_lines()))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(tmp_path / "known_hosts")], check=True, capture_output=True, timeout=30)
    text = (tmp_path / "known_hosts").read_text()
    assert text.startswith("|1|")
    assert server.address not in text
    assert works(reach(server, **fields))


@pytest.mark.parametrize("name", ["{known}", "*", "[127.0.1.*]:*", "other,{known}", "127.0.1.1"])
def test_names_with_patterns_ports_and_commas_are_found(server: Sshd, reach: Reach, known: Known, name: str) -> None:
    assert works(reach(server, **known("".join(server.known_lines(name.format(known=server.known_name))))))


def test_a_host_that_a_pattern_excludes_is_not_found(server: Sshd, reach: Reach, known: Known) -> None:
    with pytest.raises(HostKeyUnknown):
        works(reach(server, **known("".join(server.known_lines(f"*,!{server.known_name},!{server.address}")))))


def test_the_error_for_an_unknown_host_has_its_fingerprint_and_a_command(server: Sshd, reach: Reach, known: Known) -> None:
    fields = known("")
    with pytest.raises(HostKeyUnknown) as caught:
        works(reach(server, **fields))
    message = str(caught.value)
    assert message.startswith(f"gpu1: the host key of {server.user}@127.0.1.1:{server.port} is not known: ED25519 SHA256:")
    assert fingerprint(server.host_keys["ed25519"]) in message
    file = fields["known_hosts_files"][0]
    command = f"ssh-keyscan -t ed25519 -p {server.port} 127.0.1.1 >> {file}"
    assert command in message
    assert "ssh -F" in message
    assert "accept-new" in message
    # The suggested command helps.
    subprocess.run(["sh", "-c", command], check=True, capture_output=True, timeout=30)
    assert works(reach(server, **fields))


def test_a_strict_connection_does_not_write_known_hosts(server: Sshd, reach: Reach, known: Known, tmp_path: Path) -> None:
    with pytest.raises(HostKeyUnknown):
        works(reach(server, **known("# mine\n")))
    assert (tmp_path / "known_hosts").read_text() == "# mine\n"
    with pytest.raises(HostKeyUnknown):
        works(reach(server, known_hosts_files=(str(tmp_path / "none" / "known_hosts"),)))
    assert not (tmp_path / "none").exists()
    with pytest.raises(HostKeyUnknown, match="names no file of known host keys: set `UserKnownHostsFile`"):
        works(reach(server, known_hosts_files=()))


@pytest.mark.parametrize("content", ["", "# a comment without newline at its end"])
def test_accept_new_saves_the_key_and_checks_it_afterwards(
    server: Sshd, reach: Reach, known: Known, tmp_path: Path, content: str
) -> None:
    fields = known(content)
    assert works(reach(server, host_key_policy="accept-new", **fields))
    text = (tmp_path / "known_hosts").read_text()
    assert text == f"{content}{chr(10) if content else ''}{server.known_name} {public(server.host_keys['ed25519'])}\n"
    assert works(reach(server, host_key_policy="accept-new", **fields))
    assert works(reach(server, **fields))
    assert (tmp_path / "known_hosts").read_text() == text


def test_accept_new_makes_the_file_and_its_directory_private(server: Sshd, reach: Reach, tmp_path: Path) -> None:
    file = tmp_path / "dot-ssh" / "known_hosts"
    assert works(reach(server, host_key_policy="accept-new", known_hosts_files=(str(file),)))
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_accept_new_can_be_set_in_the_ssh_configuration(
    server: Sshd, reach: Reach, configure: Callable[..., str], tmp_path: Path
) -> None:
    options = {"UserKnownHostsFile": str(tmp_path / "kh"), "StrictHostKeyChecking": "accept-new", "HashKnownHosts": "yes"}
    assert works(reach(server, config_file=configure(server.client_stanza(**options))))
    assert (tmp_path / "kh").read_text().startswith("|1|")
    # The setting of the pool takes precedence.
    (tmp_path / "kh").write_text("")
    with pytest.raises(HostKeyUnknown):
        works(reach(server, config_file=configure(server.client_stanza(**options)), host_key_policy="strict"))


def test_connections_at_the_same_time_write_a_new_key_once(server: Sshd, reach: Reach, known: Known, tmp_path: Path) -> None:
    fields = known("")
    results: list[bool] = []
    transports = [reach(server, host_key_policy="accept-new", **fields) for _ in range(6)]
    threads = [threading.Thread(target=lambda one=one: results.append(works(one))) for one in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 6
    assert len((tmp_path / "known_hosts").read_text().splitlines()) == 1


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_changed_key_is_never_accepted_and_the_remedy_works(
    make_server: MakeServer, reach: Reach, known: Known, tmp_path: Path, policy: str, kind: str
) -> None:
    server = make_server()
    old = make_key(tmp_path / "old", kind=kind)
    fields = known(f"# first line\n{server.known_name} {public(old)}\n")
    with pytest.raises(HostKeyMismatch) as caught:
        works(reach(server, host_key_policy=policy, **fields))
    message = str(caught.value)
    file = fields["known_hosts_files"][0]
    assert f"gpu9: {server.user}@127.0.1.9:{server.port} showed a host key that differs" in message
    assert fingerprint(server.host_keys["ed25519"]) in message
    assert f"{fingerprint(old)} ({file}:2)" in message
    command = re.search(r"ssh-keygen -R .*", message)
    assert command is not None
    assert command[0] == f"ssh-keygen -R '[127.0.1.9]:{server.port}' -f {file}"
    subprocess.run(["sh", "-c", command[0]], check=True, capture_output=True, timeout=30)
    assert works(reach(server, host_key_policy="accept-new", **fields))


def test_the_key_of_port_22_does_not_apply_to_another_port(server: Sshd, reach: Reach, known: Known, tmp_path: Path) -> None:
    with pytest.raises(HostKeyUnknown):
        works(reach(server, **known(f"127.0.1.1 {public(make_key(tmp_path / 'other'))}\n")))


def test_a_revoked_key_is_refused_even_where_it_is_known(server: Sshd, reach: Reach, known: Known) -> None:
    revoked = "".join(f"@revoked * {public(key)}\n" for key in server.host_keys.values())
    fields = known("".join(server.known_lines()) + revoked)
    with pytest.raises(HostKeyMismatch, match=r"showed a revoked host key: ED25519 SHA256:.*known_hosts:3"):
        works(reach(server, host_key_policy="accept-new", **fields))


@pytest.mark.parametrize("form", ["lines", "binary", "other lines", "other binary"])
def test_only_the_keys_in_revoked_host_keys_are_refused(
    server: Sshd, reach: Reach, known: Known, tmp_path: Path, configure: Callable[[str], str], form: str
) -> None:
    keys = [make_key(tmp_path / "other")] if "other" in form else list(server.host_keys.values())
    revoked = tmp_path / "revoked"
    if "lines" in form:
        revoked.write_text("# keys that were stolen\n\n" + "".join(f"{public(key)} a comment\n" for key in keys))
    else:
        command = ["ssh-keygen", "-q", "-k", "-f", str(revoked), *(f"{key}.pub" for key in keys)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    stanza = server.client_stanza(RevokedHostKeys=str(revoked))
    transport = reach(server, config_file=configure(stanza), **known("".join(server.known_lines())))
    if "other" in form:
        assert works(transport)
        return
    with pytest.raises(HostKeyMismatch, match=r"showed a revoked host key: ED25519 SHA256:.*/revoked"):
        works(transport)


@pytest.mark.parametrize("content", [None, b"SSHKRL\n\0damaged"])
def test_an_unreadable_revoked_host_keys_file_prevents_connections(
    server: Sshd, reach: Reach, tmp_path: Path, configure: Callable[[str], str], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "revoked").write_bytes(content)
    stanza = server.client_stanza(RevokedHostKeys=str(tmp_path / "revoked"))
    with pytest.raises(TransportError, match=r"RevokedHostKeys .*/revoked"):
        works(reach(server, config_file=configure(stanza)))


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_host_with_several_keys_is_asked_for_the_known_one(server: Sshd, reach: Reach, known: Known, kind: str) -> None:
    assert works(reach(server, **known(f"{server.known_name} {public(server.host_keys[kind])}\n")))


def test_an_rsa_host_key_is_signed_with_sha_2(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(key_kinds=("rsa", "ed25519"))
    server.known_hosts.write_text(server.known_lines()[0])
    transport = reach(server)
    assert works(transport)
    assert transport._shared.current is not None
    assert transport._shared.current._transport is not None
    assert transport._shared.current._transport.host_key_type == "rsa-sha2-512"


def test_host_key_algorithms_and_alias_of_the_configuration_are_used(
    server: Sshd, reach: Reach, configure: Callable[..., str]
) -> None:
    known = Path(server.directory / "known_by_alias")
    known.write_text("".join(server.known_lines("the-cluster")))
    stanza = server.client_stanza(
        UserKnownHostsFile=f"/no/such/file {known}", HostKeyAlias="the-cluster", HostKeyAlgorithms="ecdsa-sha2-nistp256"
    )
    transport = reach(server, config_file=configure(stanza))
    assert works(transport)
    assert transport._shared.current is not None
    assert transport._shared.current._transport is not None
    assert transport._shared.current._transport.host_key_type == "ecdsa-sha2-nistp256"


class TestCertificates:
    """Host certificates, signed by an authority that known_hosts names."""

    @pytest.fixture
    def authority(self, tmp_path: Path) -> Path:
        return make_key(tmp_path / "authority")

    @pytest.fixture
    def certified(self, make_server: MakeServer, authority: Path) -> Callable[..., Sshd]:
        def make(*options: str, principal: str = "127.0.1.9") -> Sshd:
            server = make_server()
            key = server.host_keys["ed25519"]
            sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "gpu9", "-n", principal, *(options or ("-h",))]
            subprocess.run([*sign, f"{key}.pub"], check=True, timeout=30)
            server._options["HostCertificate"] = f"{key}-cert.pub"
            server.restart()
            return server

        return make

    def test_a_valid_certificate_is_enough(
        self, certified: Callable[..., Sshd], authority: Path, reach: Reach, known: Known
    ) -> None:
        assert works(reach(certified(), **known(f"@cert-authority [127.0.1.*]:* {public(authority)}\n")))

    @pytest.mark.parametrize(
        ("options", "principal", "why"),
        [
            (("-h",), "gpu7", "is for gpu7, not for 127.0.1.9"),
            (("-h", "-V", "20200101:20200102"), "127.0.1.9", "not valid at this time"),
            ((), "127.0.1.9", "signed by ED25519"),
        ],
    )
    def test_an_invalid_certificate_is_refused_with_the_reason(
        self,
        certified: Callable[..., Sshd],
        authority: Path,
        reach: Reach,
        known: Known,
        tmp_path: Path,
        options: tuple[str, ...],
        principal: str,
        why: str,
    ) -> None:
        server = certified(*options, principal=principal)
        trusted = authority if options else make_key(tmp_path / "another")
        with pytest.raises(HostKeyUnknown, match=why):
            works(reach(server, **known(f"@cert-authority * {public(trusted)}\n")))

    def test_an_authority_in_revoked_host_keys_is_refused(
        self, certified: Callable[..., Sshd], authority: Path, reach: Reach, known: Known, tmp_path: Path,
        configure: Callable[[str], str],
    ) -> None:  # fmt: skip
        server = certified()
        (tmp_path / "revoked").write_text(public(authority) + "\n")
        stanza = server.client_stanza(RevokedHostKeys=str(tmp_path / "revoked"))
        fields = known(f"@cert-authority * {public(authority)}\n")
        with pytest.raises(HostKeyMismatch, match="revoked"):
            works(reach(server, config_file=configure(stanza), **fields))

    def test_a_revoked_authority_is_refused(
        self, certified: Callable[..., Sshd], authority: Path, reach: Reach, known: Known
    ) -> None:
        server = certified()
        fields = known(f"@cert-authority * {public(authority)}\n@revoked * {public(authority)}\n")
        with pytest.raises(HostKeyMismatch, match="revoked"):
            works(reach(server, **fields))

    def test_a_known_key_is_accepted_without_its_certificate(
        self, certified: Callable[..., Sshd], reach: Reach, tmp_path: Path, known: Known
    ) -> None:
        server = certified()
        lines = "".join(server.known_lines())
        assert works(reach(server, **known(f"@cert-authority * {public(make_key(tmp_path / 'other'))}\n{lines}")))
