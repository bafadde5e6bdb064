"""``distflow dataset``, in the state directory and at S3."""

from __future__ import annotations

import json

import pytest

from distflow.testing.s3 import S3Server
from scenarios.conftest import Cli


@pytest.mark.parametrize("where", ["state", "s3"])
def test_versions_are_made_shown_fetched_and_removed(where: str, cli: Cli, request: pytest.FixtureRequest) -> None:
    if where == "s3":
        server: S3Server = request.getfixturevalue("s3")
        server.bucket("b")
        path = cli.folder / "distflow.yaml"
        path.write_text("datasets: s3://b/sets\n" + path.read_text())
    none = cli.run("dataset", "list")
    assert (none.code, none.out, none.err) == (0, "", "there are no datasets\n")
    (cli.folder / "data").mkdir()
    (cli.folder / "data" / "x.pt").write_text("1\n")
    (cli.folder / "data" / "y.txt").write_text("22\n")
    assert cli.run("dataset", "upload", "mnist", "data").out == "mnist:1: 2 files, 5 B\n"
    made = json.loads(cli.run("dataset", "upload", "mnist", "data", "-x", r".*\.pt", "-t", "json").out)
    assert (made["version"], made["file_count"], made["bytes"]) == (2, 1, 2)
    assert cli.run("dataset", "list").out.splitlines()[2].split()[:5] == ["mnist", "2", "2", "1", "2"]
    assert [line.split()[0] for line in cli.run("dataset", "info", "mnist").out.splitlines()[2:]] == ["1", "2"]
    assert [line.split()[0] for line in cli.run("dataset", "info", "mnist:1").out.splitlines()[2:]] == [
        "data/x.pt",
        "data/y.txt",
    ]
    (cli.folder / "got").mkdir()
    assert cli.run("dataset", "download", "mnist:1", "got", "-x", "data/y").out == "mnist:1: 1 file, 3 B\n"
    assert (cli.folder / "got" / "mnist" / "data" / "y.txt").read_text() == "22\n"
    assert cli.run("dataset", "delete", "mnist:1").out == "deleted mnist:1\n"
    for arguments, code, words in (
        (["download", "mnist:1", "got"], 2, "has no version 1"),
        (["download", "mnist", "got", "-x", "z"], 2, "nothing of mnist:2 is matched"),
        (["upload", "mnist:3", "data"], 2, "a new one gets the next number"),
        (["upload", "a/b", "data"], 2, "no name of a dataset"),
        (["delete", "mnist"], 2, "--all"),
        (["info", "none"], 2, "no dataset `none`"),
        (["delete", "none", "--all"], 2, "no dataset `none`"),
    ):
        done = cli.run("dataset", *arguments)
        assert (done.code, done.out) == (code, ""), arguments
        assert words in done.err
    assert json.loads(cli.run("dataset", "delete", "mnist", "--all", "-t", "json").out)["deleted"] == [2]
    assert json.loads(cli.run("dataset", "list", "-t", "json").out) == {"datasets": []}


def test_a_wrong_place_for_datasets_is_said(cli: Cli) -> None:
    path = cli.folder / "distflow.yaml"
    path.write_text("datasets: https://b/sets\n" + path.read_text())
    done = cli.run("dataset", "list")
    assert done.code == 2
    assert "distflow.yaml:1: error: `https://` can only be read" in done.err
