"""Every cause that a CPU can suffer, provoked in real processes: the diagnosis of what they print names it.

What needs a GPU is in ``tests/unit/diagnosis``, with the texts that torch's and NCCL's sources have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from distflow.diagnosis.diagnose import diagnose
from distflow.diagnosis.model import Case, Diagnosis, FirstFailure, TaskOutcome
from distflow.lifecycle.states import Reason
from preloaded import start_preloaded

MOUNTING = ("shared_memory_full", "disk_full", "disk_full_of_a_model")
"""As in ``faults.py``, which is not imported here because it imports torch."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

NAMES = ("master", "worker", "third")
SOURCES = Path(__file__).resolve().parents[2] / "src"
FIRST: Mapping[str, FirstFailure] = {
    "rank_killed": FirstFailure(task="worker", rank="1", message="killed by SIGKILL"),
    "rank_raises": FirstFailure(task="worker", rank="1", message="exit code 1"),
    "another_size_unchecked": FirstFailure(task="worker", rank="1", message="killed by SIGABRT"),
}
"""As the verdict has it, where one task clearly failed before the others."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """What each fault left, as distflow would have it of a gang of one-rank tasks."""
    folder = tmp_path_factory.mktemp("faults")
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("faults.py")
    with open(os.devnull, "r+") as null:
        files = (null.fileno(), null.fileno(), 2)
        main = start_preloaded(tmp_path_factory.getbasetemp(), [str(script), str(folder)], folder, environment, *files)
    assert main.wait(200) == 0
    results: dict[str, dict[str, int]] = json.loads((folder / "results.json").read_text())
    return {
        name: Case(
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
    "world_size_differs": ("world-size-mismatch", "rank 0 (master on gpu1) waits for 3 ranks, but the layout has 2"),
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
    "collective_missed": ("collective-timeout", "rank 0 (master on gpu1) waited for 3 s; worker on gpu2 did not wait"),
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
    "told_missing": ("rank-missing", "rank 2 (third on gpu3) did not arrive"),
    "told_twice": ("rank-twice", "rank 1, seen by rank "),
    "told_size": ("world-size-mismatch", "expects"),
    "devices_mixed": ("devices-mixed", "on rank 0 (master on gpu1), rank 1 (worker on gpu2)"),
    "states_mixed": ("devices-mixed", "on rank 0 (master on gpu1)"),
    "shared_memory_full": ("shared-memory", "on rank 0 (master on gpu1)"),
    "disk_full": ("disk-full", "on rank 0 (master on gpu1)"),
    "disk_full_of_a_model": ("disk-full", "on rank 0 (master on gpu1)"),
    "told_no_master": ("master-unreachable", "rank 1 (worker on gpu2) did not reach 127.0.0.1, port "),
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_cause_is_named(cases: dict[str, Case], fault: str) -> None:
    if fault in MOUNTING and fault not in cases:
        pytest.skip("no mount namespaces here")
    key, found = EXPECTED[fault]
    told = diagnose(cases[fault])
    assert told, _printed(cases[fault])
    assert told[0].key == key, _printed(cases[fault])
    assert found in told[0].found, told
    assert told[0].remedy


def test_each_fault_is_expected(cases: dict[str, Case]) -> None:
    assert set(EXPECTED) - set(MOUNTING) <= set(cases) <= set(EXPECTED)


def test_a_killed_rank_is_named_with_whom_it_left_behind(cases: dict[str, Case]) -> None:
    told: dict[str, Diagnosis] = {one.key: one for one in diagnose(cases["rank_killed"])}
    assert list(told) == ["killed", "peer-died"]
    assert told["peer-died"].found.endswith("killed by SIGKILL; rank 0 (master on gpu1) then lost the connection")


def test_the_words_of_the_first_to_fail_are_shown_and_not_those_of_its_peers(cases: dict[str, Case]) -> None:
    (told,) = diagnose(cases["rank_raises"])
    assert (told.task, told.line) == ("worker", "[rank1]: ValueError: a label that is none")


def _printed(case: Case) -> str:
    return "\n".join(f"[{outcome.task}] {line}" for outcome in case.outcomes for line in outcome.lines[-20:])
