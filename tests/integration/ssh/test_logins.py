"""Logins with keys in files and agents and with certificates, and the errors when none of them is accepted."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distflow.errors import AuthenticationRefused
from distflow.testing.sshd import Sshd, make_key
from integration.ssh.conftest import MakeServer, Reach
from integration.ssh.test_hostkeys import fingerprint, works

pytestmark = pytest.mark.ssh

Configure = Callable[..., str]


class Agent:
    """A real ssh-agent."""

    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        self._process = subprocess.Popen(
            ["ssh-agent", "-D", "-a", self.socket], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        assert b"SSH_AUTH_SOCK" in self._process.stdout.readline()  # it listens

    def add(self, key: Path, passphrase: str = "") -> None:
        """Add a key; its passphrase comes from a program, as ssh-add has no option for it."""
        ask = key.with_name("askpass")
        ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
        ask.chmod(0o700)
        environment = {**os.environ, "SSH_AUTH_SOCK": self.socket, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, stdin=subprocess.DEVNULL, timeout=30)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)


@pytest.fixture
def agent(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    # The path of a socket must be short.
    made = Agent(tmp_path_factory.mktemp("a") / "s")
    yield made
    made.close()


def test_a_refused_login_names_the_host_and_the_tried_key(server: Sshd, reach: Reach, tmp_path: Path) -> None:
    unauthorized = make_key(tmp_path / "unauthorized")
    with pytest.raises(AuthenticationRefused) as caught:
        works(reach(server, identity_file=str(unauthorized), config_file=_config_without_keys(server, tmp_path)))
    message = str(caught.value)
    assert message.startswith(f"gpu1: {server.user}@127.0.1.1:{server.port} refused the key")
    assert f"ED25519 {fingerprint(unauthorized)} {unauthorized}" in message


def test_the_key_of_the_node_comes_before_those_of_the_configuration(server: Sshd, reach: Reach, tmp_path: Path) -> None:
    unauthorized = make_key(tmp_path / "unauthorized")
    config = tmp_path / "config"
    config.write_text(server.client_stanza(IdentityFile=str(unauthorized)))
    assert works(reach(server, config_file=str(config), identity_file=str(server.user_key)))


def test_several_identity_files_are_tried_in_turn(server: Sshd, reach: Reach, tmp_path: Path, configure: Configure) -> None:
    keys = [make_key(tmp_path / name) for name in ("one", "two")]
    lines = "".join(f"  IdentityFile {key}\n" for key in (*keys, "/no/such/key", server.user_key))
    assert works(reach(server, config_file=configure(server.client_stanza(IdentityFile="") + lines)))


def test_default_keys_of_the_home_are_found(server: Sshd, reach: Reach, configure: Configure) -> None:
    folder = Path.home() / ".ssh"
    folder.mkdir()
    (folder / "id_ed25519").write_bytes(server.user_key.read_bytes())
    (folder / "id_ed25519").chmod(0o600)
    assert works(reach(server, config_file=configure(server.client_stanza(IdentityFile=""))))


def test_a_login_without_a_key_is_reported(server: Sshd, reach: Reach, configure: Configure) -> None:
    with pytest.raises(AuthenticationRefused, match=r"there is no usable key for .*: no key was found") as caught:
        works(reach(server, config_file=configure(server.client_stanza(IdentityFile="/no/such/key"))))
    assert "/no/such/key: file not found" in str(caught.value)


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_key_with_a_passphrase_needs_the_agent_and_works_with_it(
    make_server: MakeServer, reach: Reach, tmp_path: Path, configure: Configure, agent: Agent, kind: str
) -> None:
    server = make_server()
    key = make_key(tmp_path / "locked", kind=kind, passphrase="open sesame")
    server.authorize(Path(f"{key}.pub"))
    with pytest.raises(AuthenticationRefused) as caught:
        works(reach(server, config_file=configure(server.client_stanza(IdentityFile=str(key)))))
    message = str(caught.value)
    assert "there is no usable key for" in message
    assert f": {key} is protected by a passphrase" in message
    assert f"run `ssh-add {key}`" in message
    agent.add(key, "open sesame")
    # Without the public key file, the private key file identifies the key in the agent.
    Path(f"{key}.pub").unlink()
    assert works(reach(server, config_file=configure(server.client_stanza(IdentityFile=str(key), IdentityAgent=agent.socket))))


def test_the_agent_of_the_environment_is_used(
    server: Sshd, reach: Reach, configure: Configure, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(server.user_key)
    stanza = server.client_stanza(IdentityFile="/no/such/key", IdentitiesOnly="no", IdentityAgent="")
    with pytest.raises(AuthenticationRefused):
        works(reach(server, config_file=configure(stanza)))
    monkeypatch.setenv("SSH_AUTH_SOCK", agent.socket)
    assert works(reach(server, config_file=configure(stanza)))


def test_identities_only_excludes_the_other_keys_of_the_agent(
    server: Sshd, reach: Reach, configure: Configure, agent: Agent
) -> None:
    agent.add(server.user_key)
    stanza = server.client_stanza(IdentityFile="/no/such/key", IdentityAgent=agent.socket)
    with pytest.raises(
        AuthenticationRefused, match=r"there is no usable key for \S+\n(?s:.*)excludes 1 other key of the agent$"
    ):
        works(reach(server, config_file=configure(stanza)))


def test_a_public_key_file_selects_a_key_of_the_agent(
    server: Sshd, reach: Reach, configure: Configure, agent: Agent, tmp_path: Path
) -> None:
    agent.add(server.user_key)
    (tmp_path / "mine.pub").write_text(Path(f"{server.user_key}.pub").read_text())
    for name in ("mine", "mine.pub"):
        stanza = server.client_stanza(IdentityFile=str(tmp_path / name), IdentityAgent=agent.socket)
        assert works(reach(server, config_file=configure(stanza)))


def test_the_configured_key_is_tried_before_the_other_keys_of_the_agent(
    make_server: MakeServer, reach: Reach, configure: Configure, agent: Agent, tmp_path: Path
) -> None:
    server = make_server()
    for number in range(7):
        agent.add(make_key(tmp_path / f"other{number}"))
    agent.add(server.user_key)
    stanza = server.client_stanza(IdentitiesOnly="no", IdentityAgent=agent.socket)
    assert works(reach(server, config_file=configure(stanza)))
    # Without that key, the server refuses the login after too many keys.
    with pytest.raises(AuthenticationRefused, match="keys were tried; perhaps it allows fewer tries") as caught:
        works(reach(server, config_file=configure(stanza.replace(str(server.user_key), "/no/such/key"))))
    assert "IdentitiesOnly yes" in caught.value.hint


def test_an_agent_that_does_not_respond_is_named(server: Sshd, reach: Reach, configure: Configure, tmp_path: Path) -> None:
    stanza = server.client_stanza(IdentityFile="/no/such/key", IdentityAgent=str(tmp_path / "gone"))
    with pytest.raises(AuthenticationRefused) as caught:
        works(reach(server, config_file=configure(stanza)))
    assert f"the agent at {tmp_path / 'gone'} does not respond" in str(caught.value)


def test_a_file_that_is_not_a_key_is_named(server: Sshd, reach: Reach, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_text("this is not a key\n")
    with pytest.raises(AuthenticationRefused) as caught:
        works(reach(server, config_file=configure(server.client_stanza(IdentityFile=str(tmp_path / "garbage")))))
    assert f"{tmp_path / 'garbage'} is not a usable private key" in str(caught.value)


def test_a_server_that_accepts_only_passwords_is_reported(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(options={"PubkeyAuthentication": "no", "PasswordAuthentication": "yes"})
    with pytest.raises(AuthenticationRefused, match="the host accepts only password, which distflow never uses"):
        works(reach(server))


def test_a_server_that_requires_a_second_factor_is_reported(make_server: MakeServer, reach: Reach) -> None:
    server = make_server(options={"AuthenticationMethods": "publickey,password", "PasswordAuthentication": "yes"})
    with pytest.raises(AuthenticationRefused, match="accepted, but the host requires further authentication"):
        works(reach(server))


class TestUserCertificates:
    """A server that accepts only keys with a certificate of its authority."""

    @pytest.fixture
    def trusting(self, make_server: MakeServer, tmp_path: Path) -> Sshd:
        authority = make_key(tmp_path / "authority")
        return make_server(options={"TrustedUserCAKeys": f"{authority}.pub", "AuthorizedKeysFile": "none"})

    def _sign(self, server: Sshd, tmp_path: Path, key: Path) -> Path:
        sign = ["ssh-keygen", "-q", "-s", str(tmp_path / "authority"), "-I", "me", "-n", server.user, f"{key}.pub"]
        subprocess.run(sign, check=True, timeout=30)
        return Path(f"{key}-cert.pub")

    @pytest.mark.parametrize("kind", ["ed25519", "rsa"])
    def test_a_certificate_next_to_the_key_is_used(
        self, trusting: Sshd, reach: Reach, tmp_path: Path, configure: Configure, kind: str
    ) -> None:
        key = make_key(tmp_path / "certified", kind=kind)
        config = configure(trusting.client_stanza(IdentityFile=str(key)))
        with pytest.raises(AuthenticationRefused, match="refused the key"):
            works(reach(trusting, config_file=config))
        self._sign(trusting, tmp_path, key)
        assert works(reach(trusting, config_file=config))

    def test_a_certificate_that_the_configuration_names_is_used(
        self, trusting: Sshd, reach: Reach, tmp_path: Path, configure: Configure
    ) -> None:
        key = make_key(tmp_path / "certified")
        elsewhere = tmp_path / "elsewhere.pub"
        self._sign(trusting, tmp_path, key).rename(elsewhere)
        stanza = trusting.client_stanza(IdentityFile=str(key), CertificateFile=str(elsewhere))
        assert works(reach(trusting, config_file=configure(stanza)))

    def test_a_certificate_for_a_key_in_the_agent_is_used(
        self, trusting: Sshd, reach: Reach, tmp_path: Path, configure: Configure, agent: Agent
    ) -> None:
        key = make_key(tmp_path / "certified", passphrase="secret")
        agent.add(key, "secret")
        self._sign(trusting, tmp_path, key)
        stanza = trusting.client_stanza(IdentityFile=str(key), IdentityAgent=agent.socket)
        assert works(reach(trusting, config_file=configure(stanza)))

    def test_a_certificate_in_the_agent_is_used(
        self, trusting: Sshd, reach: Reach, tmp_path: Path, configure: Configure, agent: Agent
    ) -> None:
        key = make_key(tmp_path / "certified")
        self._sign(trusting, tmp_path, key)
        agent.add(key)
        stanza = trusting.client_stanza(IdentityFile="/no/such/key", IdentitiesOnly="no", IdentityAgent=agent.socket)
        assert works(reach(trusting, config_file=configure(stanza)))


def _config_without_keys(server: Sshd, tmp_path: Path) -> str:
    """Write a configuration without keys."""
    config = tmp_path / "alone"
    config.write_text(re.sub(r"  IdentityFile .*\n", "", server.client_stanza()))
    return str(config)
