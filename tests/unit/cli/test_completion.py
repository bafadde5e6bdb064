"""Completion of command lines, as a shell requests it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.cli.app import run
from unit.cli.screen import Screen
from unit.state.stored import T0, completed_group, submit, task_log, workflow

CONFIGURATION = """
default_pool: lab
pools:
  lab:
    backend: ssh
    nodes: [{name: gpu1, host: a}, {name: gpu2, host: b}]
  other:
    backend: ssh
    nodes: [{name: big, host: c}]
notify: [{name: ci, url: "https://ci.example/hook"}]
"""


class Completions:
    """Requests completions as bash does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def of(self, line: str) -> list[str]:
        """Return the completions of the last word of ``distflow LINE``. Fail if standard error is not empty."""
        words = ["distflow", *line.split(" ")]
        self._monkeypatch.setenv("_DISTFLOW_COMPLETE", "complete_bash")
        self._monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        self._monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run([])
        out, err = self._capsys.readouterr()
        assert (end.value.code, err) == (0, "")
        return out.split()


@pytest.fixture
def completions(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Completions:
    """Completions with three workflows in the store, metrics of the last one, two pools, a hostfile and a credential."""
    for number, name in enumerate(("digits", "wide", "digits")):
        last = submit(screen.store, workflow([completed_group()], name=name, number=number, at=T0 + number))
    screen.store.tag(last.uuid, add=["baseline"])
    metrics = {"step": 1, "loss": 0.5, "lr/x": 2, "\\$(touch pwned)": 1, "a b": 1, "*": 1}
    task_log(screen.directory, last, "master", [(T0, f"{json.dumps(metrics)}\n".encode())])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distflow.yaml").write_text(CONFIGURATION)
    (tmp_path / "hosts").write_text("far1 slots=8\nfar2 slots=8\n")
    assert run(["credential", "set", "wandb", "--payload", "key=1"]) == 0
    return Completions(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("workf", ["workflow"]),
        ("st", ["status", "stop"]),
        ("workflow que", ["query"]),
        ("workflow submit x.yaml --prio", ["--priority"]),
        ("workflow query dig", ["digits-2", "digits-1"]),
        ("workflow status w", ["wide-1"]),
        ("stop digits-1 w", ["wide-1"]),
        ("workflow tag -w d", ["digits-2", "digits-1"]),
        ("workflow tag -a b", ["baseline"]),
        ("logs digits-1 --task ", ["master", "worker"]),
        ("logs --rank 3 - --task m", ["master"]),
        ("workflow exec digits w", ["worker"]),
        ("fetch digits --task w", ["worker"]),
        ("workflow port-forward digits m", ["master"]),
        ("workflow why digits-1 --group ", ["training"]),
        ("workflow metrics digits --key ", ["loss", "lr/x"]),
        ("workflow list --status FAILED_IM", ["FAILED_IMAGE_PULL"]),
        ("task list --status SCH", ["SCHEDULING"]),
        ("list -p ", ["lab", "other"]),
        ("profile set ", ["pool", "notify"]),
        ("profile set pool o", ["other"]),
        ("profile set notify w", ["wandb"]),
        ("notify test --name ", ["ci"]),
        ("pool check --node ", ["gpu1", "gpu2", "big"]),
        ("pool check --pool lab --node ", ["gpu1", "gpu2"]),
        ("pool check --hostfile hosts --node f", ["far1", "far2"]),
        ("resource info g", ["gpu1", "gpu2"]),
        ("credential delete ", ["wandb"]),
        ("submit x.yaml --priority ", ["HIGH", "NORMAL", "LOW"]),
        ("workflow list --format-type j", ["json"]),
        ("init --sample hel", ["hello-world"]),
        ("logs nope --task ", []),
        ("pool check --hostfile none --node ", []),
    ],
)
def test_values_are_completed(completions: Completions, line: str, expected: list[str]) -> None:
    assert completions.of(line) == expected


def test_completion_without_a_usable_store_or_configuration_prints_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    completions = Completions(monkeypatch, capsys)
    monkeypatch.setenv("DISTFLOW_STATE", str(tmp_path / "none"))
    for line in ("logs d", "logs digits-1 --task ", "workflow tag -a ", "credential delete "):
        assert completions.of(line) == []
    assert list(tmp_path.iterdir()) == []
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "distflow.sqlite3").write_bytes(b"no database" * 100)
    monkeypatch.setenv("DISTFLOW_STATE", str(broken))
    assert completions.of("logs d") == []
    monkeypatch.chdir(tmp_path)
    for configuration in ("pools: [", "pools: 7", "pools: {lab: 7}", "pools: {lab: {nodes: 7}}"):
        (tmp_path / "distflow.yaml").write_text(configuration)
        assert completions.of("list -p ") in ([], ["lab"])
