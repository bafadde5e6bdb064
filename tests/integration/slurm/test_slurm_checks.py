"""``pool check`` for Slurm, on a real cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.backends.allocated.slurm.commands import SlurmCommands, SlurmLogin
from distflow.backends.allocated.slurm.slurm_checks import check_slurm
from distflow.pools.load import Machine, parse_configuration
from distflow.testing.slurm import Slurm
from distflow.testing.waiting import wait_until
from distflow.transports.local import LocalTransport

Check = Callable[..., str]


@pytest.fixture
def check_pool(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))

    def check(settings: str, *, python: str = "python3") -> str:
        text = f"pools: {{c: {{backend: slurm, root: {tmp_path}/root, python: {python}, {settings}}}}}"
        machine = Machine(cpus=1, memory=1, gpus=0, python="p")
        pool = parse_configuration(text, "distflow.yaml", root="/r", machine=machine).pools["c"]
        commands = SlurmCommands(SlurmLogin(LocalTransport("login"), is_local=True))
        return "\n".join(finding.as_text() for finding in check_slurm(pool, commands))

    return check


def test_a_correct_pool_has_only_notes(check_pool: Check, slurm: Slurm, tmp_path: Path) -> None:
    found = check_pool("slurm: {time: 1h}, platforms: {h100: {gres: 'gpu:h100', partition: main}}")
    assert "error" not in found
    assert "warning" not in found
    assert found.startswith("note: login: Slurm 2")
    for text in (
        "note: login: Slurm accepts a job of one node; it would start at",
        "note: login: Slurm accepts a job of one node (platform `h100`); it would start at",
        "note: login: on a node, `python3` is Python 3.",
        f"note: login: `{tmp_path}/root` is shared with the login node",
    ):
        assert text in found
    assert list((tmp_path / "root").iterdir()) == []
    # Slurm may still be completing the job of the check.
    wait_until(lambda: not slurm.jobs(), 30, "the end of the job of the check")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("slurm: {partition: mainn}", "error: login: there is no partition `mainn`\n    did you mean `main`?"),
        ("platforms: {x: {partition: nope}}", "error: login: there is no partition `nope` (platform `x`)"),
        ("slurm: {partition: closed}", "error: login: partition `closed` is DOWN\n"),
        (
            "slurm: {partition: short, time: 1h}",
            "error: login: `slurm.time` is 60 min, but the limit of partition `short` is 5 min\n",
        ),
        (
            "slurm: {gres: 'gpu:a100'}",
            "error: login: no node has the generic resource `gpu:a100`\n    change `slurm.gres` of the pool; the nodes have",
        ),
        (
            "slurm: {gres: tpu}",
            "warning: login: no node has the generic resource `tpu`\n    tasks that request GPUs cannot run",
        ),
        (
            "slurm: {constraint: x}",
            "error: login: Slurm refused a job of one node: Invalid feature specification\n    change `slurm.constr",
        ),
        ("slurm: {container: pyxis}", "warning: login: `/no/such/python`, the `python` of the pool, must exist"),
        ("slurm: {reservation: x}", "error: login: Slurm refused a job of one node: Requested reservation is invalid\n"),
        (
            "slurm: {extra: [--nope]}",
            "error: login: Slurm refused a job of one node: unrecognized option '--nope'\n    check `slurm.extra`",
        ),
    ],
)
def test_mistakes_have_remedies(check_pool: Check, slurm: Slurm, settings: str, message: str) -> None:
    if "closed" in settings or "short" in settings:
        slurm.run("scontrol", "create", "PartitionName=closed", "Nodes=ALL", "State=DOWN")
        slurm.run("scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=5")
    try:
        assert message in check_pool(
            settings, python="/no/such/python" if "tpu" in settings or "pyxis" in settings else "python3"
        )
    finally:
        if "closed" in settings or "short" in settings:
            slurm.run("scontrol", "delete", "PartitionName=closed")
            slurm.run("scontrol", "delete", "PartitionName=short")


def test_limits_of_the_partition_are_named(check_pool: Check, slurm: Slurm) -> None:
    slurm.run("scontrol", "create", "PartitionName=small", "Nodes=ALL", "MaxTime=30", "MaxNodes=1")
    try:
        assert "note: login: partition `small` allows jobs of at most 1 node and 30 min" in check_pool(
            "slurm: {partition: small}"
        )
    finally:
        slurm.run("scontrol", "delete", "PartitionName=small")


def test_a_node_whose_srun_fails_is_named(
    check_pool: Check, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The environment of the login node reaches the node. There, this `srun` comes first in PATH.
    (tmp_path / "srun").write_text(
        f'#!/bin/sh\n[ -z "$SLURMD_NODENAME" ] || {{ echo "not here" >&2; exit 3; }}\nexec {slurm.commands}/srun "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = check_pool("slurm: {}")
    assert "error: login: `srun --overlap` fails on a node: not here\n" in found
    assert "is Python 3." in found


def test_a_python_that_does_not_run_on_the_nodes_is_reported(check_pool: Check, slurm: Slurm) -> None:
    found = check_pool("slurm: {}", python="/no/such/python")
    assert "error: login: `/no/such/python` does not run on a node: " in found
    assert "No such file or directory" in found
    assert "\n    set `python` of the pool" in found


def test_without_a_free_node_python_is_not_checked(check_pool: Check, slurm: Slurm) -> None:
    job = slurm.run("sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 300").strip()
    wait_until(lambda: "RUNNING" in slurm.run("squeue", "--noheader", "--format=%T", f"--jobs={job}"), what="the job runs")
    found = check_pool("slurm: {}")
    assert "error" not in found
    assert "note: login: Python on the nodes was not checked: no node is free now" in found
    assert slurm.jobs() == [job]
