"""The commands, environments and files of each launcher and framework, compared with ``goldens/frameworks``."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from distflow.documents.problems import errors_of
from distflow.layout.checks.group_checks import check_layout
from distflow.plan.compatibility import distributed_environment
from distflow.plan.compile import compile_plan
from distflow.plan.frameworks import FRAMEWORKS, LAUNCHERS
from distflow.plan.model import GroupPlan, Launch
from distflow.plan.render import script
from distflow.spec.files import LIBRARY, Bundle
from distflow.spec.parse import load_spec_text, schema_text

GOLDENS = Path(__file__).parents[2] / "goldens" / "frameworks"
CASES = sorted(GOLDENS.glob("*.yaml"))
RENEW = "DISTFLOW_RENEW_GOLDENS=1 pytest tests/unit/plan/test_framework_goldens.py"
COMMON_PREFIXES = ("DISTFLOW_", "VH_", "PYTHONUNBUFFERED", "PET_", "NCCL_", "GLOO_", "TP_", "CUDA_VISIBLE_DEVICES", "OMP_")
"""Prefixes of the variables of every task of a world, which other tests cover."""


def plan_of(path: Path) -> GroupPlan:
    spec, _ = load_spec_text(path.read_text(encoding="utf-8"), path.name, path.parent)
    worlds, problems = check_layout(spec)
    assert not errors_of(problems)
    bundles = {LIBRARY: Bundle(digest="0" * 64, size=4096, mode=0o700, is_tar=True)}
    (group,) = compile_plan(spec, worlds, pool="lab", bundles=bundles).groups
    return group


def described(group: GroupPlan, launch: Launch) -> list[str]:
    shown = {
        name: value
        for name, value in launch.environment.items()
        if not name.startswith(COMMON_PREFIXES) or name == "DISTFLOW_STRATEGY"
    }
    lines = [f"{launch.task}:", *(f"  {word}" for word in launch.argv), "environment:"]
    lines += [f"  {name}={value}" for name, value in shown.items()]
    lines += [f"  PYTHONPATH=…:{path}" for path in launch.python_path]
    for file in launch.files:
        lines += [f"{file.path}:", *(f"  {line}" for line in (file.text or f"the archive {file.shown}").splitlines())]
    return lines


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_plan_matches_the_golden_file(path: Path) -> None:
    group = plan_of(path)
    parts = ["\n".join(described(group, launch)) for launch in group.launches]
    parts += ["the others are stopped when the lead has completed"] if group.ends_with_lead else []
    found = "\n\n".join(parts) + "\n"
    golden = path.with_suffix(".txt")
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found, encoding="utf-8")
    wanted = golden.read_text(encoding="utf-8") if golden.exists() else ""
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), golden.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", f"if this is right: {RENEW}"]), pytrace=False)


def test_every_framework_and_launcher_is_in_a_golden_file_and_in_the_schema() -> None:
    texts = "\n".join(path.read_text() for path in CASES)
    for name in FRAMEWORKS:
        assert f"framework: {name}\n" in texts, name
        assert f'"{name}"' in schema_text(), name
    for name in LAUNCHERS:
        assert f"{name}" in texts, name
        assert f'"{name}"' in schema_text(), name


def test_variables_of_the_spec_override_the_framework() -> None:
    text = (GOLDENS / "jax.yaml").read_text().replace("lead: true,", "lead: true, environment: {JAX_NUM_PROCESSES: '7'},")
    spec, _ = load_spec_text(text, "spec.yaml", GOLDENS)
    worlds, _ = check_layout(spec)
    bundles = {LIBRARY: Bundle(digest="0" * 64, size=4096, mode=0o700, is_tar=True)}
    launch = compile_plan(spec, worlds, pool="lab", bundles=bundles).groups[0].launches[0]
    assert (launch.environment["JAX_NUM_PROCESSES"], launch.environment["JAX_PROCESS_ID"]) == ("7", "0")


def test_the_script_to_run_by_hand_has_the_files_and_the_python_path() -> None:
    group = plan_of(GOLDENS / "deepspeed.yaml")
    text = script(group, group.launches[0])
    assert '"$ATTEMPT_DIR"/config/hostfile' in text
    assert '"$ATTEMPT_DIR"/config/distributed.json' in text
    assert 'export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}"' in text
    assert distributed_environment("master", {})["VH_JOB_ID"].startswith("exec-")


def test_the_script_to_run_by_hand_mentions_that_it_has_no_container(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("workflow: {name: w, tasks: [{name: t, image: 'py:3', command: ['true']}, {name: u, command: ['true']}]}\n")
    spec, _ = load_spec_text(path.read_text(), path.name, path.parent)
    launches = [(group, launch) for group in compile_plan(spec, {}, pool="lab", bundles={}).groups for launch in group.launches]
    assert ["without a container" in script(group, launch) for group, launch in launches] == [True, False]


def test_the_script_to_run_by_hand_creates_the_parents_of_checkpoints(tmp_path: Path) -> None:
    checkpoint = "{path: /tmp/models, url: 'file:///x', frequency: 60}"
    path = tmp_path / "spec.yaml"
    path.write_text(f"workflow: {{name: w, tasks: [{{name: t, command: ['true'], checkpoint: [{checkpoint}]}}]}}\n")
    group = plan_of(path)
    assert 'mkdir -p "$ATTEMPT_DIR"/files/tmp\n' in script(group, group.launches[0])
