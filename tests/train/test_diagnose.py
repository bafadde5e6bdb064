"""Provoke every fault that needs no GPU in real processes: the diagnosis of their output names the cause.

``tests/unit/diagnosis`` tests the faults that need a GPU, with messages from the sources of torch and NCCL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from distflow.diagnosis.diagnose import diagnose
from distflow.diagnosis.model import Diagnosis, FirstFailure, GroupOutcome, TaskOutcome
from distflow.lifecycle.states import Reason
from preloaded import start_preloaded

NEED_MOUNT = ("shared_memory_full", "disk_full", "disk_full_of_a_model")
"""The constant of ``faults.py``, which is not imported here because it imports torch."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

NAMES = ("master", "worker", "third")
SOURCES = Path(__file__).resolve().parents[2] / "src"
FIRST: Mapping[str, FirstFailure] = {
    "rank_killed": FirstFailure(task="worker", rank="1", message="killed by SIGKILL"),
    "rank_raises": FirstFailure(task="worker", rank="1", message="exit code 1"),
    "another_size_unchecked": FirstFailure(task="worker", rank="1", message="killed by SIGABRT"),
}
"""The first failure, for faults in which one task clearly failed before the others."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GroupOutcome]:
    """The outcomes of each fault, as distflow records them for a gang of tasks with one rank each."""
    folder = tmp_path_factory.mktemp("faults")
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("faults.py")
    with open(os.devnull, "r+") as null:
        files = (null.fileno(), null.fileno(), 2)
        main = start_preloaded(tmp_path_factory.getbasetemp(), [str(script), str(folder)], folder, environment, *files)
    assert main.wait(200) == 0
    results: dict[str, dict[str, int]] = json.loads((folder / "results.json").read_text())
    return {
        name: GroupOutcome(
            outcomes=tuple(_outcome(folder / name, int(rank), codes[rank]) for rank in sorted(codes)), first=FIRST.get(name)
        )
        for name, codes in results.items()
    }


def _outcome(folder: Path, rank: int, code: int) -> TaskOutcome:
    return TaskOutcome(
        task=NAMES[rank],
        node=f"gpu{rank + 1}",
        ranks=range(rank, rank + 1),
        lines=tuple((folder / f"{rank}.log").read_text(errors="replace").splitlines()),
        reason=Reason.SIGNAL if code < 0 else Reason.EXIT_CODE if code else None,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
    )


EXPECTED = {
    "master_unreachable": ("master-unreachable", r"rank 1 (worker on gpu2) did not reach 127.0.0.1, port "),
    "master_unknown": ("master-unreachable", "did not reach no-such-host.invalid, port "),
    "rank_missing": ("rank-missing", "rank 2 (third on gpu3) did not arrive"),
    "rank_twice": ("rank-twice", "rank 2 (third on gpu3) waits for rank 2 itself"),
    "world_size_differs": (
        "world-size-mismatch",
        "rank 0 (master on gpu1) waits for 3 processes, but the layout has 2 ranks in 2 tasks",
    ),
    "another_collective": (
        "collective-mismatch",
        (
            "rank 0 (master on gpu1) called allreduce of shape [4, 2] Float as collective 0; "
            "rank 1 (worker on gpu2) called broadcast of shape [4, 2] Float as collective 0"
        ),
    ),
    "another_shape": ("collective-mismatch", "called allreduce of shape [3, 3]"),
    "another_size_unchecked": ("collective-mismatch", "rank 1 (worker on gpu2) received 4096 bytes but expected 512"),
    "barrier_missed": ("barrier-missed", "rank 1 (worker on gpu2) did not arrive; rank 0 (master on gpu1) waited"),
    "collective_missed": (
        "collective-timeout",
        "rank 0 (master on gpu1) waited for 3 s; no timeout was reported by worker on gpu2",
    ),
    "rank_killed": ("killed", "rank 1 (worker on gpu2) was ended by SIGKILL"),
    "rank_raises": (
        "peer-died",
        "rank 1 (worker on gpu2) failed first: exit code 1; rank 0 (master on gpu1) then lost the connection",
    ),
    "no_such_interface": ("wrong-interface", "has no address on the interface nosuch0"),
    "mesh_too_big": ("mesh-too-big", "the mesh has 16 places, but the world has 2 ranks"),
    "parameters_unused": ("unused-parameters", "parameters number 2 3"),
    "no_memory": ("host-memory", "tried to allocate 4096.0 TiB"),
    "port_taken": ("port-taken", "rank 0 (master on gpu1) could not listen on port "),
    "variable_missing": ("variable-missing", "RANK is not set in rank 0 (master on gpu1), rank 1 (worker on gpu2)"),
    "module_missing": ("module-missing", "no_such_module: not found by rank 0 (master on gpu1)"),
    "file_missing": ("file-missing", "no/such/data.npz: not found by rank 0 (master on gpu1)"),
    "init_rank_missing": ("rank-missing", "rank 2 (third on gpu3) did not arrive"),
    "init_rank_twice": ("rank-twice", "rank 1, seen by rank "),
    "init_world_size_differs": ("world-size-mismatch", "expects"),
    "devices_mixed": ("devices-mixed", "on rank 0 (master on gpu1), rank 1 (worker on gpu2)"),
    "states_mixed": ("devices-mixed", "on rank 0 (master on gpu1)"),
    "shared_memory_full": ("shared-memory", "on rank 0 (master on gpu1)"),
    "disk_full": ("disk-full", "on rank 0 (master on gpu1)"),
    "disk_full_of_a_model": ("disk-full", "on rank 0 (master on gpu1)"),
    "init_master_unreachable": ("master-unreachable", "rank 1 (worker on gpu2) did not reach 127.0.0.1, port "),
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_cause_is_named(cases: dict[str, GroupOutcome], fault: str) -> None:
    if fault in NEED_MOUNT and fault not in cases:
        pytest.skip("no mount namespaces here")
    key, text = EXPECTED[fault]
    diagnoses = diagnose(cases[fault])
    assert diagnoses, _output(cases[fault])
    assert diagnoses[0].key == key, _output(cases[fault])
    assert text in diagnoses[0].found, diagnoses
    assert diagnoses[0].remedy


def test_every_fault_has_an_expected_diagnosis(cases: dict[str, GroupOutcome]) -> None:
    assert set(EXPECTED) - set(NEED_MOUNT) <= set(cases) <= set(EXPECTED)


def test_a_killed_rank_is_diagnosed_together_with_its_disconnected_peer(cases: dict[str, GroupOutcome]) -> None:
    diagnoses: dict[str, Diagnosis] = {one.key: one for one in diagnose(cases["rank_killed"])}
    assert list(diagnoses) == ["killed", "peer-died"]
    assert diagnoses["peer-died"].found.endswith("killed by SIGKILL; rank 0 (master on gpu1) then lost the connection")


def test_the_diagnosis_quotes_the_rank_that_failed_first_and_not_its_peers(cases: dict[str, GroupOutcome]) -> None:
    (diagnosis,) = diagnose(cases["rank_raises"])
    assert (diagnosis.task, diagnosis.line) == ("worker", "[rank1]: ValueError: invalid label")


def _output(group: GroupOutcome) -> str:
    return "\n".join(f"[{outcome.task}] {line}" for outcome in group.outcomes for line in outcome.lines[-20:])
