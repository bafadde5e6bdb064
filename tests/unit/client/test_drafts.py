"""The specs that ``distflow run`` and ``distflow init`` write from a command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from distflow.client.spec_drafts.drafts import Draft, complete_draft, draft_command, spec_text
from distflow.client.spec_drafts.quick_run import draft_run
from distflow.errors import InputError
from distflow.pools.model import Configuration, Node, ssh_node
from distflow.spec.model import WorkflowSpec
from distflow.spec.parse import load_spec_text
from distflow.structs import replace


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "repository" / "project"
    made.mkdir(parents=True)
    (made.parent / ".git").mkdir()
    (made / "train.py").touch()
    return made


def nodes(*gpus: int | None) -> list[Node]:
    return [replace(ssh_node(), name=f"n{number}", host="n", gpus=count) for number, count in enumerate(gpus)]


def load_draft(draft: Draft, folder: Path) -> WorkflowSpec:
    """Return the spec of a draft. Fail if the spec has a problem."""
    spec, problems = load_spec_text(spec_text(draft), "spec.yaml", folder)
    assert problems == ()
    return spec


def words_of(spec: WorkflowSpec) -> list[str]:
    return [word.value for word in spec.groups[0].tasks[0].command]


def test_arguments_are_written_to_the_spec_unchanged(project: Path) -> None:
    words = [
        "train.py",
        "--lr",
        "0.1",
        "yes",
        "",
        "a: b",
        "# no comment",
        "{% raw %}",
        "${#list}",
        'it\'s "quoted"',
        "a\nb",
        "ä",
        "-",
    ]
    spec = load_draft(complete_draft(draft_command(words, folder=project), [], count=2), project)
    assert words_of(spec) == ["python3", *words]
    assert [(task.name, task.lead, task.launcher.kind) for task in spec.groups[0].tasks] == [
        ("node-0", True, "torchrun"),
        ("node-1", False, "torchrun"),
    ]
    assert spec.groups[0].tasks[0].files[0].local_path == str(project)
    assert spec.name == "train"


def test_tokens_are_not_escaped(project: Path) -> None:
    spec = load_draft(complete_draft(draft_command(["train.py", "--to", "{{output}}/m"], folder=project), []), project)
    assert words_of(spec)[-1] == "{{output}}/m"


@pytest.mark.parametrize(
    ("words", "launcher", "name"),
    [
        (["train.py"], "torchrun", "train"),
        (["python", "-u", "train.py"], "torchrun", "train"),
        (["python3", "-m", "pkg.main"], "torchrun", "main"),
        (["./1_start.sh", "x"], "command", "run-1_start"),
        (["python3", "-c", "print(1)"], "command", "python3"),
        (["nvidia-smi"], "command", "nvidia-smi"),
    ],
)
def test_the_launcher_and_the_name_depend_on_the_command(project: Path, words: list[str], launcher: str, name: str) -> None:
    draft = draft_command(words, folder=project)
    assert (draft.launcher, draft.name) == (launcher, name)
    load_draft(complete_draft(draft, [], count=2, ranks=2), project)


def test_one_process_needs_no_launcher(project: Path) -> None:
    assert complete_draft(draft_command(["train.py"], folder=project), []).launcher == "command"


def test_options_of_torchrun_become_fields_of_the_draft(project: Path) -> None:
    line = (
        "torchrun --nnodes=2 --nproc-per-node 8 --rdzv_backend=c10d --rdzv-endpoint $HOST:1 --max-restarts 3 --tee 3 "
        "train.py --nnodes 5"
    )
    draft = draft_command(line.split(), folder=project)
    assert (draft.nodes, draft.ranks, draft.max_restarts) == (2, 8, 3)
    assert draft.command == ("python3", "train.py", "--nnodes", "5")
    assert draft.notes == ("`--tee 3` of torchrun has no counterpart, so it is left out",)
    # The ignored problem is a warning, because torchrun numbers the nodes.
    spec, _ = load_spec_text(spec_text(complete_draft(draft, [])), "spec.yaml", project)
    assert spec.groups[0].tasks[1].launcher.max_restarts == 3

    module = draft_command(["python", "-m", "torch.distributed.run", "--nnodes", "1:4", "-m", "pkg.main", "-x"], folder=project)
    assert (module.nodes, module.command) == (4, ("python3", "-m", "pkg.main", "-x"))
    assert "elastic: {min: 1}" in module.notes[0]
    unknown = draft_command(["torchrun", "--nnodes", "$NODES", "train.py"], folder=project)
    assert unknown.notes == ("`--nnodes $NODES` of torchrun is not a number, so it is left out",)
    plain = draft_command(["torchrun", "--no-python", "./train"], folder=project)
    assert (plain.launcher, plain.command) == ("command", ("torchrun", "--no-python", "./train"))
    with pytest.raises(InputError, match="has no script"):
        draft_command(["torchrun", "--nnodes", "2"], folder=project)


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        ([8, 8], {}, (8, 8)),
        ([8, 4], {}, (4, 4)),
        ([8, None], {}, (None, 1)),
        ([8, 8], {"gpus": 0}, (0, 1)),
        ([8, 8], {"ranks": 4}, (4, 4)),
        ([2, 2], {"ranks": 4}, (None, 4)),
        ([None, None], {"gpus": 4, "ranks": 2}, (4, 2)),
        ([0, 0], {}, (None, 1)),
    ],
)
def test_numbers_of_gpus_and_ranks_depend_on_the_nodes(
    project: Path, gpus: list[int | None], given: dict[str, Any], expected: tuple[int | None, int]
) -> None:
    draft = complete_draft(draft_command(["train.py"], folder=project), nodes(*gpus), count=2, **given)
    assert (draft.gpus, draft.ranks) == expected


@pytest.mark.parametrize(
    ("value", "gpus", "given", "expected"),
    [
        ("gpu", [8, 8], {}, 8),
        ("auto", [None, None], {"gpus": 4}, 4),
        ("gpu", [None, None], {"ranks": 2}, 2),
        ("gpu", [None, None], {}, "--gpus N"),
        ("auto", [0, 0], {"gpus": 0}, "--gpus N"),
        ("cpu", [8, 8], {}, "--nproc-per-node N"),
        ("$N", [8, 8], {}, "--nproc-per-node N"),
    ],
)
def test_keywords_of_nproc_per_node_become_a_number_or_an_error(
    project: Path, value: str, gpus: list[int | None], given: dict[str, Any], expected: int | str
) -> None:
    draft = draft_command(["torchrun", "--nproc_per_node", value, "train.py"], folder=project)
    if isinstance(expected, int):
        complete = complete_draft(draft, nodes(*gpus), count=2, must_know=True, **given)
        assert (complete.ranks, complete.notes) == (expected, ())
        return
    with pytest.raises(InputError, match=f"`--nproc_per_node {re.escape(value)}` is not known\\n.*{expected}"):
        complete_draft(draft, nodes(*gpus), count=2, must_know=True, **given)
    assert expected in complete_draft(draft, nodes(*gpus), count=2, **given).notes[0]


def test_project_is_the_working_directory_or_the_repository_of_the_script(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = project / "deep" / "er"
    below.mkdir(parents=True)
    (below / "other.py").touch()
    elsewhere = draft_command(["../../train.py"], folder=below)
    assert (elsewhere.project, elsewhere.command) == ("../../..", ("python3", "project/train.py"))
    here = draft_command(["deep/er/other.py"], folder=project)
    assert (here.project, here.command) == (".", ("python3", "deep/er/other.py"))
    assert draft_command(["nvidia-smi"], folder=below, project=Path("..")).project == ".."
    with pytest.raises(InputError, match=r"`trian.py` does not exist\ndid you mean `train.py`"):
        draft_command(["trian.py"], folder=project)
    (below / "python/python/x.py").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"`python/x.py` is a directory\nrelative paths are relative to `{below}/python`"):
        draft_command(["python/x.py"], folder=below / "python")
    with pytest.raises(InputError, match="not in the project"):
        draft_command(["train.py"], folder=project, project=Path("deep"))
    monkeypatch.setenv("HOME", str(project))
    for folder, sent in ((project, "of your home directory"), (project.parent, "in .*, including your home directory,")):
        with pytest.raises(InputError, match=rf"^all files {sent} would be sent to the nodes\n.* your project$"):
            draft_command(["nvidia-smi"], folder=folder)
        monkeypatch.chdir(folder)
        with pytest.raises(InputError, match=r"your project, or name it with --project$"):
            draft_run(["nvidia-smi"], Configuration(pools={}, default_pool="local"), results=project)
