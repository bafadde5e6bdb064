"""Fixtures: real OpenSSH servers on loopback addresses, and for root, hosts in network namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.kernel import Network, missing_netns
from distflow.testing.sshd import Sshd, missing_sshd
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.transport import SshTransport

Reach = Callable[..., SshTransport]
MakeServer = Callable[..., Sshd]


@pytest.fixture(scope="session")
def _has_sshd() -> None:
    if why := missing_sshd():
        pytest.skip(why)


@pytest.fixture(scope="session")
def server(_has_sshd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A server for tests that do not change it: ``gpu1``, with two host keys."""
    with Sshd(tmp_path_factory.mktemp("gpu1"), "127.0.1.1", alias="gpu1", key_kinds=("ed25519", "ecdsa")) as made:
        yield made


@pytest.fixture
def make_server(server: Sshd, tmp_path: Path) -> Iterator[MakeServer]:
    """Start servers of a test's own: ``make_server(alias, address, …)``."""
    with contextlib.ExitStack() as stack:

        def make(alias: str = "gpu9", address: str = "127.0.1.9", **options: Any) -> Sshd:
            given = {"user_key": server.user_key, **options}
            return stack.enter_context(Sshd(tmp_path / f"sshd-{alias}", address, alias=alias, **given))

        yield make


@pytest.fixture
def reach() -> Iterator[Reach]:
    """Make transports to a server: ``reach(server, host=…, …)`` with the fields of ``SshDestination``."""
    with contextlib.ExitStack() as stack:

        def make(server: Sshd, **fields: Any) -> SshTransport:
            given = {"host": server.alias, "config_file": str(server.client_config), **fields}
            transport = SshTransport(server.alias, SshDestination(**given))
            stack.callback(transport.close)
            return transport

        yield make


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., str]:
    """Write an SSH configuration of these blocks and return its path."""

    def write(*blocks: str, name: str = "config") -> str:
        path = tmp_path / name
        path.write_text("\n".join(blocks))
        return str(path)

    return write


@pytest.fixture(scope="session")
def network(_has_sshd: None) -> Iterator[Network]:
    """A network whose hosts can be cut off."""
    if why := missing_netns():
        pytest.skip(why)
    with Network() as made:
        yield made
