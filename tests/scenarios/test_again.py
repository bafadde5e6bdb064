"""``workflow submit`` with a stored spec, and the labels and priority of a submission."""

from __future__ import annotations

import json
from pathlib import Path

from scenarios.conftest import Cli

SPEC = """
default-values: {word: first}
workflow:
  name: again
  labels: {team: vision}
  tasks:
  - name: only
    command: [sh, -c, 'echo "{{word}} $TOKEN {% raw %}{% raw %}{% endraw %}"; cat data.txt']
    files:
    - {path: data.txt, localpath: data.txt}
"""


def _submit_spec(cli: Cli) -> Path:
    folder = cli.folder / "specs"
    folder.mkdir()
    (folder / "data.txt").write_text("from next to the spec\n")
    (folder / "spec.yaml").write_text(SPEC)
    done = cli.run(
        "workflow", "submit", str(folder / "spec.yaml"), "--set", "word=second", "--set-env", "TOKEN=secret-1", "--wait",
        "--label", "run=a.1", "--label", "team=speech", "--priority", "high",
    )  # fmt: skip
    assert done.code == 0, done.err
    return folder


def test_a_stored_spec_runs_again_with_its_values_files_labels_and_priority(cli: Cli) -> None:
    folder = _submit_spec(cli)
    # Files next to the spec are read again; the spec itself is not.
    (folder / "spec.yaml").unlink()
    (folder / "data.txt").write_text("changed since\n")
    done = cli.run("workflow", "submit", "again-1", "--set-env", "TOKEN=secret-2", "--wait", "--label", "run=b")
    assert done.code == 0, done.err
    assert "[only] second ******** {% raw %}\n[only] changed since\n" in done.out
    answer = cli.query("again-2")
    assert (answer["labels"], answer["priority"]) == ({"team": "speech", "run": "b"}, "HIGH")
    assert cli.run("workflow", "spec", "again-2").out == cli.run("workflow", "spec", "again-1").out
    assert cli.run("workflow", "spec", "again-2", "--template").out == SPEC
    dry = cli.run("workflow", "submit", "again-2", "--set-env", "TOKEN=x", "--dry-run")
    assert dry.code == 0, dry.err
    assert [one["name"] for one in json.loads(cli.run("workflow", "list", "-t", "json").out)["workflows"]] == [
        "again-1",
        "again-2",
    ]


def test_wrong_arguments_with_a_stored_spec_are_reported(cli: Cli) -> None:
    _submit_spec(cli)
    for arguments, words in (
        (
            ["again-1"],
            "of again-1 again: TOKEN. distflow does not use the secrets of a workflow for another one\nuse --set-env TOKEN=…",
        ),
        (["again-1", "--set", "word=third"], "`distflow workflow spec again-1 --template`"),
        (["again-7"], "there is no workflow `again-7`\nsimilar ids: again-1"),
        (["again-1", "--label", "team=a b"], "`a b` is not a valid label value"),
        (["again-1", "--priority", "urgent"], "`urgent` is not a priority"),
        (["nothing.yaml"], "nothing.yaml"),
    ):
        done = cli.run("workflow", "submit", *arguments)
        assert done.code == 2, arguments
        assert words in done.err, done.err
