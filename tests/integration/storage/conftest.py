"""Fixtures: real servers for S3 and for sftp."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.testing.s3 import S3Server, missing_rclone
from distflow.testing.sshd import Sshd, missing_sshd


@pytest.fixture
def s3(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with its credentials in the environment."""
    for name, value in running_s3.environment.items():
        monkeypatch.setenv(name, value)
    return running_s3


@pytest.fixture(scope="session")
def running_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One server for the tests of sftp."""
    if why := missing_sshd():
        pytest.skip(why)
    with Sshd(tmp_path_factory.mktemp("sshd"), "127.0.5.1", alias="store") as server:
        yield server


@pytest.fixture
def sshd(running_sshd: Sshd) -> Sshd:
    """The server, known to the OpenSSH configuration of this test's home as ``store``."""
    folder = Path(os.environ["HOME"]) / ".ssh"
    folder.mkdir(mode=0o700)
    (folder / "config").write_text(running_sshd.client_stanza())
    return running_sshd


@pytest.fixture
def own_s3(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server that the test can stop."""
    if why := missing_rclone():
        pytest.skip(why)
    with S3Server(tmp_path_factory.mktemp("own-s3")) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
