"""Downloads refuse a directory that they cannot use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distflow.client.client import Client
from distflow.client.data import download_data, download_dataset
from distflow.errors import InputError, StorageError


def test_a_resumed_download_to_a_path_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / ("a" * 250)).touch()
    while len(str(target)) < 3900:
        target /= "d" * 100
    target.mkdir(parents=True)
    client = Client(environ={**os.environ, "DISTFLOW_STATE": str(tmp_path / "state")})
    with client, pytest.raises(StorageError, match="File name too long"):
        download_data(client, f"file://{source}", target, resume=True)


@pytest.mark.parametrize("name", ["missing dir", "a file"])
def test_a_download_names_the_remedy_for_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").touch()
    target = tmp_path / name
    expected = {
        "missing dir": f"the directory {target} does not exist\ncreate it: mkdir -p '{target}'",
        "a file": f"{target} is not a directory\nchoose another path",
    }
    with Client(environ={**os.environ, "DISTFLOW_STATE": str(tmp_path / "state")}) as client:
        for download in (download_data, download_dataset):
            with pytest.raises(InputError) as refused:
                download(client, f"file://{tmp_path}" if download is download_data else "digits", target)
            assert str(refused.value) == expected[name]
