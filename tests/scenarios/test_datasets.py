"""``distflow dataset``, in the state directory and at S3."""

from __future__ import annotations

import json

import pytest

from distflow.testing.s3 import S3Server
from scenarios.conftest import Cli


@pytest.mark.parametrize("where", ["state", "s3"])
def test_versions_are_uploaded_listed_downloaded_and_deleted(where: str, cli: Cli, request: pytest.FixtureRequest) -> None:
    if where == "s3":
        server: S3Server = request.getfixturevalue("s3")
        server.bucket("b")
        path = cli.folder / "distflow.yaml"
        path.write_text("datasets: s3://b/sets\n" + path.read_text())
    none = cli.run("dataset", "list")
    assert (none.code, none.out, none.err) == (0, "", "There are no datasets yet.\n")
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
        (["download", "mnist", "got", "-x", "z"], 2, "no file of mnist:2 matches"),
        (["upload", "mnist:3", "data"], 2, "a new version gets the next number"),
        (["upload", "a/b", "data"], 2, "not a valid dataset name"),
        (["delete", "mnist"], 2, "--all"),
        (["info", "none"], 2, "no dataset `none`"),
        (["delete", "none", "--all"], 2, "no dataset `none`"),
    ):
        done = cli.run("dataset", *arguments)
        assert (done.code, done.out) == (code, ""), arguments
        assert words in done.err
    assert json.loads(cli.run("dataset", "delete", "mnist", "--all", "-t", "json").out)["deleted"] == [2]
    assert json.loads(cli.run("dataset", "list", "-t", "json").out) == {"datasets": []}


CHAIN = """
workflow:
  name: chain
  tasks:
  - name: train
    command:
    - sh
    - -c
    - |
      mkdir -p "{{output}}/model/deep"; echo n > "{{output}}/notes"
      cat "{{input:0}}/numbers/"* > "{{output}}/model/deep/sum.pt"
    inputs:
    - dataset: {name: "numbers:1", regex: one}
    outputs:
    - dataset: {name: model, path: model, regex: .*pt}
    - dataset: {name: all}
    - update_dataset: {name: numbers, paths: [model, notes]}
  - name: rate
    command: [sh, -c, 'cat "{{input:1}}/model/model/deep/sum.pt"']
    inputs:
    - task: train
    - dataset: {name: model}
"""


@pytest.mark.parametrize("where", ["state", "s3"])
def test_tasks_read_datasets_and_write_new_versions(where: str, cli: Cli, request: pytest.FixtureRequest) -> None:
    if where == "s3":
        server: S3Server = request.getfixturevalue("s3")
        server.bucket("b")
        path = cli.folder / "distflow.yaml"
        path.write_text("datasets: s3://b/sets\n" + path.read_text())
    for name, text in (("one", "1\n"), ("two", "2\n")):
        (cli.folder / name).write_text(text)
    assert cli.run("dataset", "upload", "numbers", "one", "two").code == 0
    assert cli.run("dataset", "upload", "numbers", "two").code == 0
    dry = cli.run("workflow", "submit", cli.spec(CHAIN), "--dry-run").out
    assert "dataset numbers:1 (only one) → <ATTEMPT_DIR>/input/0" in dry
    assert "dataset model" in dry
    done = cli.run("workflow", "submit", cli.spec(CHAIN), "--wait")
    assert done.code == 0, done.err
    assert "[rate] 1\n" in done.out
    events = cli.run("workflow", "events", "chain-1").out
    fetched = "is fetched by its node" if where == "s3" else "was fetched"
    assert f"[train] its input {fetched}: dataset numbers:1: 1 file, 2 B" in events
    assert "[train] its output is at dataset model:1: 1 file, 2 B" in events
    assert f"[rate] its input {fetched}: dataset model:1: 1 file, 2 B" in events
    (found,) = json.loads(cli.run("dataset", "info", "all:1", "-t", "json").out)["versions"]
    assert [one["path"] for one in found["files"]] == ["model/deep/sum.pt", "notes"]
    # The files of version 2, and the new ones.
    assert "[train] its output is at dataset numbers:3: 3 files" in events
    (found,) = json.loads(cli.run("dataset", "info", "numbers:3", "-t", "json").out)["versions"]
    assert [one["path"] for one in found["files"]] == ["model/deep/sum.pt", "notes", "two"]
    assert cli.run("dataset", "delete", "numbers:2").code == 0
    assert cli.run("dataset", "download", "numbers", ".").code == 0
    assert (cli.folder / "numbers" / "two").read_text() == "2\n"


def test_a_version_is_written_once_when_the_supervisor_is_killed(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    path = cli.folder / "distflow.yaml"
    path.write_text("datasets: s3://b/sets\n" + path.read_text())
    go = cli.folder / "go"
    ident = cli.submit(
        cli.spec(
            "workflow:\n  name: once\n  tasks:\n  - name: only\n"
            f"    command: [sh, -c, 'echo x > {{{{output}}}}/x; while [ ! -e {go} ]; do sleep 0.2; done']\n"
            "    outputs: [{dataset: {name: model}}]\n"
        )
    )
    cli.await_running(ident)
    s3.freeze()
    go.touch()
    cli.await_group_message(ident, "writing outputs: dataset model")
    cli.kill_supervisor()
    s3.thaw()
    cli.await_status(ident, "COMPLETED")
    (one,) = json.loads(cli.run("dataset", "list", "-t", "json").out)["datasets"]
    assert one["versions"] == [1]


def test_a_missing_dataset_or_output_path_fails_the_group(cli: Cli) -> None:
    spec = "workflow:\n  name: none\n  tasks:\n  - {name: a, command: ['true'], inputs: [{dataset: {name: 'none:2'}}]}\n"
    done = cli.run("workflow", "submit", cli.spec(spec), "--wait")
    assert done.code == 1
    assert "a: an input cannot be fetched: there is no dataset `none`" in done.err
    spec = "workflow:\n  name: lost\n  tasks:\n  - {name: a, command: ['true'], outputs: [{dataset: {name: m, path: x}}]}\n"
    done = cli.run("workflow", "submit", cli.spec(spec), "--wait")
    assert done.code == 1
    assert "its output cannot be written: dataset m: the output has no `x`" in done.err


def test_a_read_only_url_for_datasets_is_reported(cli: Cli) -> None:
    path = cli.folder / "distflow.yaml"
    path.write_text("datasets: https://b/sets\n" + path.read_text())
    done = cli.run("dataset", "list")
    assert done.code == 2
    assert "distflow.yaml:1: error: `https://` can only be read" in done.err
