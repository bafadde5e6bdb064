"""``distflow notify`` and the notifications of the profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.cli.app import run
from unit.cli.screen import Screen

CONFIGURATION = """\
pools: {local: {backend: local, defaults: {gpus: 0}}}
notify:
- {command: [sh, -c, 'cat > "$HOME/test.json"'], name: file, on: [failed, waiting], after: 1h}
- credential: team
"""
SPEC = """\
workflow:
  name: job
  notify: [{url: "http://127.0.0.1:9/hook"}, {credential: team}]
  tasks: [{name: one, command: ["true"]}]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command next to a configuration and a spec, and returns its code and output."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distflow.yaml").write_text(CONFIGURATION)
    (tmp_path / "spec.yaml").write_text(SPEC)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return run(list(arguments)), *capsys.readouterr()

    return call


def test_targets_are_listed_with_their_problems(command: Run) -> None:
    code, out, _ = command("notify", "list", "-t", "json")
    assert code == 0
    file, team = json.loads(out)["notifications"]
    assert (file["name"], file["on"], file["after_s"], file["line"], file["problem"]) == (
        "file", ["failed", "waiting"], 3600.0, 3, None,
    )  # fmt: skip
    assert (team["credential"], team["after_s"], team["problem"]) == ("team", None, "this machine has no credential `team`")
    assert command("credential", "set", "team", "--payload", "url=http://127.0.0.1:9/T0S3CR3T")[0] == 0
    assert command("profile", "set", "notify", "team")[:2] == (
        0, "Set notify to team. To test it: distflow notify test\n",
    )  # fmt: skip
    assert "\nNotify: team\n" in command("profile", "list")[1]
    code, out, _ = command("notify", "list", "spec.yaml")
    assert (code, [line.split()[0] for line in out.splitlines()[2:]]) == (
        0,
        ["file", "team", "team", "http://127.0.0.1:9", "team"],
    )
    assert "T0S3CR3T" not in out
    assert command("profile", "unset", "notify")[0] == 0
    assert "Notify" not in command("profile", "list")[1]


def test_a_test_message_is_sent_to_the_chosen_targets(command: Run, tmp_path: Path) -> None:
    assert command("notify", "test", "--name", "file", "--on", "waiting") == (0, "file: sent\n", "")
    body = json.loads((tmp_path / "test.json").read_text())
    assert (body["test"], body["on"]) == (True, "waiting")
    code, out, _ = command("notify", "test", "-t", "json")
    file, team = json.loads(out)["notifications"]
    assert (code, file["sent"], file["error"], team["sent"]) == (3, True, None, False)
    assert team["error"].startswith("this machine has no credential `team`: set it: ")
    code, _, err = command("notify", "test", "--name", "flie")
    assert (code, "there is no notification target `flie`" in err, "did you mean `file`" in err) == (2, True, True)


def test_a_configuration_without_targets_is_reported(command: Run, tmp_path: Path) -> None:
    (tmp_path / "distflow.yaml").write_text("pools: {local: {backend: local}}\n")
    for verb in ("list", "test"):
        code, out, err = command("notify", verb)
        assert (code, out, "No target is notified" in err) == (0, "", True)


def test_problems_of_targets_and_of_the_spec_are_reported_together(command: Run, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("name: one", "nam: one"))
    assert command("credential", "set", "mail", "--payload", "url=x")[0] == 0
    code, _, err = command("submit", "spec.yaml", "--dry-run")
    assert code == 2
    assert [line.partition(": ")[0].rpartition("/")[2] for line in err.splitlines() if ": error: " in line] == [
        "distflow.yaml:4", "spec.yaml:3", "spec.yaml:4",
    ]  # fmt: skip
