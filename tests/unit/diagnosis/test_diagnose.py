"""The rules of the diagnosis and their order, mostly with messages of CUDA, NCCL and the driver from their sources.

``tests/train/test_diagnose.py`` causes the failures that need no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from distflow.diagnosis.diagnose import diagnose
from distflow.diagnosis.ends import END_RULES
from distflow.diagnosis.model import FirstFailure, GroupOutcome, Level, TaskOutcome
from distflow.diagnosis.rules import RULES
from distflow.lifecycle.states import Reason
from distflow.structs import replace

MASTER = TaskOutcome(task="master", node="gpu1", ranks=range(8))
WORKER = TaskOutcome(task="worker", node="gpu2", ranks=range(8, 16))
LOST = "RuntimeError: [pair.cc:537] Read error [10.0.0.1]:45283: Connection reset by peer."


def group_outcome(*lines: str, first: str = "", other: str = LOST, **end: Any) -> GroupOutcome:
    """Return a gang whose worker printed ``lines`` and whose master printed ``other``. ``end`` is the worker's end."""
    worker = replace(WORKER, lines=lines, **end)
    failure = FirstFailure(task="worker", rank="11", message=first) if first else None
    return GroupOutcome(outcomes=(replace(MASTER, lines=(other,)), worker), first=failure)


OUT_OF_MEMORY = """
[rank11]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB
 of which 1.12 GiB is free. Process 1 has 70.00 GiB memory in use.
""".replace("\n", "")
SHARED = "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space left on device (28)"
WATCHDOG = """
[rank9]:[E1218 20:27:21.41 ProcessGroupNCCL.cpp:629] [Rank 9] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1,
 OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.
""".replace("\n", "")
BUS_ERROR = "RuntimeError: DataLoader worker (pid 53) is killed by signal: Bus error. It is possible that workers are out of …"
VERSIONS = "gpu2:812 NCCL WARN Mismatched NCCL version detected : rank 8 version 22705 rank 0 version 22703"
LOOPBACK = "NCCL WARN socketPollConnect: connect to 127.0.1.1<41234> returned Connection refused, exceeded error retry count"


SAME_DEVICE = """
[rank11]: RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:3 and cpu! (when
 checking argument for argument mat1 in method wrapper_CUDA_addmm)
""".replace("\n", "")
CONVOLUTION = "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same"


@pytest.mark.parametrize(
    ("line", "key", "found"),
    [
        (
            OUT_OF_MEMORY,
            "gpu-memory",
            "rank 11 (worker on gpu2) tried to allocate 2.00 GiB; GPU 3 has 79.11 GiB, of which 1.12 GiB were",
        ),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling …", "gpu-memory", "worker on gpu2"),
        ("OutOfMemory: some rank ran out of memory in 11 steps in a row: use …", "gpu-memory", "worker on gpu2"),
        (SHARED, "shared-memory", "on worker on gpu2"),
        (BUS_ERROR, "shared-memory", "on worker on gpu2"),
        (VERSIONS, "nccl-versions", "rank 8 (worker on gpu2) has 22705, rank 0 (master on gpu1) has 22703"),
        ("CUDA error: no kernel image is available for execution on the device", "unlike-gpus", "worker on gpu2"),
        ("RuntimeError: CUDA error: invalid device ordinal", "too-few-gpus", "worker on gpu2"),
        ("Duplicate GPU detected : rank 8 and rank 9 both on CUDA device 1a000", "too-few-gpus", "worker on gpu2"),
        (SAME_DEVICE, "devices-mixed", "on rank 11 (worker on gpu2)"),
        (CONVOLUTION, "devices-mixed", "worker on gpu2"),
        ("NCCL WARN Bootstrap : no socket interface found", "wrong-interface", "found no interface"),
        (LOOPBACK, "wrong-interface", "got 127.0.1.1 as the address of a rank on another node"),
        ("Bootstrap Root : mismatch in rank count from procs 16 : 8", "world-size-mismatch", "expects 16 ranks, another"),
        ("Bootstrap Root : rank 9 of 16 ranks has already checked in", "rank-twice", "it belongs to worker on gpu2"),
        ("ncclSystemError: System call or external library call failed", "nccl-system", "worker on gpu2"),
        (
            WATCHDOG.replace("Timeout(ms)=600000", "Timeout(ms)=1800123"),
            "collective-timeout",
            "waited in broadcast for 30 min; no timeout was reported by master",
        ),
        (
            WATCHDOG,
            "collective-timeout",
            "rank 9 (worker on gpu2) waited in broadcast for 10 min; no timeout was reported by master on gpu1",
        ),
        ("OSError: [Errno 28] No space left on device: 'model.pt'", "disk-full", "worker on gpu2"),
        ("ImportError: libcudnn.so.9: cannot open shared object file", "module-missing", "libcudnn.so.9"),
        ("MemoryError", "host-memory", "worker on gpu2"),
        ("the strategy is for 8 ranks (2 × 4), but there are 4: start 8", "mesh-too-big", "the mesh has 8 places, but the"),
        ("the strategy is for 1 rank, but there are 8: start 1 rank", "mesh-too-big", "the mesh has 1 place, but the"),
        ("the strategy is for 2 ranks, but there is 1: start 2 ranks", "mesh-too-big", "the mesh has 2 places, but the"),
    ],
)
def test_a_message_is_recognized_by_its_rule(line: str, key: str, found: str) -> None:
    diagnoses = diagnose(group_outcome("step 12", line, first="exit code 1"))
    assert [one.key for one in diagnoses] == [key]
    assert found in diagnoses[0].found
    assert diagnoses[0].line == line
    assert diagnoses[0].task == "worker"


def test_different_precisions_are_not_different_devices() -> None:
    diagnoses = diagnose(
        group_outcome("RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be …")
    )
    assert [one.key for one in diagnoses] == ["peer-died"]


def test_a_message_of_the_kernel_outranks_all_others() -> None:
    diagnoses = diagnose(
        group_outcome(
            "MemoryError",
            "RuntimeError: CUDA error: invalid device ordinal",
            first="out of memory: the kernel killed process 9",
            reason=Reason.OOM_KILLED,
            kernel=("Out of memory: Killed process 9 (python3)",),
        )
    )
    assert [one.key for one in diagnoses] == ["host-memory"]
    assert diagnoses[0].found == "worker on gpu2: out of memory: the kernel killed process 9"
    assert diagnoses[0].line == "Out of memory: Killed process 9 (python3)"


def test_a_fault_of_a_gpu_is_found_in_the_kernel_log() -> None:
    diagnoses = diagnose(
        group_outcome(LOST, first="exit code 1", kernel=("NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",))
    )
    assert [one.key for one in diagnoses] == ["gpu-fault"]


def test_a_lost_connection_is_traced_to_the_first_failure() -> None:
    (diagnosis,) = diagnose(
        group_outcome("ValueError: a label that is none", first="exit code 1: ValueError: a label that is none")
    )
    assert diagnosis.key == "peer-died"
    assert diagnosis.found == (
        "rank 11 (worker on gpu2) failed first: exit code 1: ValueError: a label that is none; "
        "master on gpu1 then lost the connection"
    )


def test_an_error_of_another_task_is_not_the_cause_of_an_unknown_failure() -> None:
    (diagnosis,) = diagnose(
        group_outcome(
            "AssertionError", first="exit code 1", other="FileNotFoundError: [Errno 2] No such file or directory: 'x'"
        )
    )
    assert (diagnosis.key, diagnosis.task) == ("peer-died", "worker")


def test_a_cause_outranks_a_lost_connection_without_a_known_first_failure() -> None:
    diagnoses = diagnose(group_outcome("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert [one.key for one in diagnoses] == ["gpu-memory"]


def test_a_loopback_address_is_wrong_only_between_nodes() -> None:
    line = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:18349$0"
    assert [one.key for one in diagnose(group_outcome(line))] == ["wrong-interface"]
    outcomes = tuple(replace(one, node="gpu1") for one in group_outcome(line).outcomes)
    assert [one.key for one in diagnose(GroupOutcome(outcomes=outcomes))] == ["collective-timeout"]


@pytest.mark.parametrize(
    ("end", "keys"),
    [
        ({"reason": Reason.SIGNAL, "signal": 9}, ["killed"]),
        ({"reason": Reason.EXIT_CODE, "exit_code": 137}, ["killed"]),
        ({"reason": Reason.SIGNAL, "signal": 11}, ["crashed"]),
        ({"reason": Reason.NODE_LOST}, ["node-lost"]),
        ({"reason": Reason.EXEC_TIMEOUT}, ["too-long"]),
        ({"reason": Reason.START_TIMEOUT}, ["start-timeout"]),
        ({"reason": Reason.START_ERROR, "exit_code": 127}, ["program-missing"]),
        ({"reason": Reason.START_ERROR, "exit_code": 126}, ["program-missing"]),
        ({"reason": Reason.START_ERROR}, ["start-error"]),
        ({"reason": Reason.EVICTED, "signal": 9}, ["memory-limit"]),
        ({"reason": Reason.IMAGE_PULL}, ["image-pull"]),
        ({"reason": Reason.DATA}, ["data-transfer"]),
        ({"reason": Reason.INTERNAL}, ["guard-died"]),
        ({"reason": Reason.QUEUE_TIMEOUT}, ["queue-timeout"]),
        ({"reason": Reason.PEER_FAILED, "signal": 9}, []),
        ({"reason": Reason.EXIT_CODE, "exit_code": 3}, []),
    ],
)
def test_the_end_of_a_task_is_diagnosed_without_a_message(end: dict[str, Any], keys: list[str]) -> None:
    assert [one.key for one in diagnose(group_outcome("step 12", other="step 12", **end))] == keys


def test_torchruns_store_may_count_nodes_instead_of_ranks() -> None:
    line = "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."
    (diagnosis,) = diagnose(group_outcome(line, other="step 12"))
    assert (diagnosis.key, diagnosis.found) == ("rank-missing", "worker on gpu2 waited; 1 of 2 arrived")
    (wrong,) = diagnose(group_outcome(line.replace("1/2", "15/24"), other="step 12"))
    expected = "worker on gpu2 waits for 24 processes, but the layout has 16 ranks in 2 tasks"
    assert (wrong.key, wrong.found) == ("world-size-mismatch", expected)


def test_a_long_list_of_names_is_shortened_with_the_number_of_the_others() -> None:
    missing = [f"ModuleNotFoundError: No module named 'module{number}'" for number in range(11)]
    (diagnosis,) = diagnose(group_outcome(*missing, other="step 12"))
    assert "module7 and 3 others: not found by worker on gpu2" in diagnosis.found


def test_a_key_names_a_rank_only_in_the_default_process_group() -> None:
    line = "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /{}//cpu//0/5"
    (diagnosis,) = diagnose(group_outcome(line.format("default_pg/0"), other="step 12"))
    assert (diagnosis.key, diagnosis.found) == ("rank-missing", "rank 5 (master on gpu1) did not arrive; worker on gpu2 waited")
    (other,) = diagnose(group_outcome(line.format("7"), other="step 12"))
    assert (other.key, other.found) == ("rank-missing", "worker on gpu2 waited")


def test_a_hang_is_reported_before_a_timeout_of_ranks() -> None:
    silent = replace(
        group_outcome("Timed out waiting 3000ms for recv operation to complete", other="step 12"), silence="no task has printed"
    )
    assert [(one.key, one.found) for one in diagnose(silent)] == [
        ("hang", "no task has printed"),
        ("collective-timeout", "worker on gpu2 waited for 3 s; no timeout was reported by master on gpu1"),
    ]


def test_every_rule_is_complete_and_has_a_unique_key() -> None:
    every = (*RULES, *END_RULES)
    assert len({rule.key for rule in every}) == len(every)
    for rule in every:
        assert rule.shows, rule.key
        assert rule.remedy.endswith("."), rule.key
        assert not rule.cause.endswith("."), rule.key
    assert [rule.level for rule in RULES] == sorted(rule.level for rule in RULES), "the most specific first"
    assert {rule.level for rule in RULES} == set(Level)


STACK = """\
Traceback (most recent call last):
  File "/data/train.py", line 15, in <module>
    train(batch)
  File "/venv/lib/python3.11/site-packages/torch/utils/data.py", line 8, in train
    raise ValueError("bad label")
ValueError: bad label"""


def raised(*lines: str, traceback: str = STACK) -> GroupOutcome:
    """Return a gang in which rank 11, of the worker, ended with an exception."""
    before = group_outcome(*lines)
    return replace(before, first=FirstFailure(task="worker", rank="11", message="exit code 1", traceback=traceback))


def test_an_exception_that_no_rule_knows_is_the_cause() -> None:
    (diagnosis,) = diagnose(raised("step 12", "[rank12]: RuntimeError: Connection closed by peer [10.0.0.1]:45283"))
    assert (diagnosis.key, diagnosis.task, diagnosis.traceback) == ("exception", "worker", STACK)
    assert diagnosis.found == (
        "rank 11 (worker on gpu2) raised ValueError: bad label (/data/train.py, line 15); "
        "master on gpu1, rank 12 (worker on gpu2) then lost the connection"
    )


def test_the_rank_that_failed_first_is_not_listed_among_those_that_lost_the_connection() -> None:
    (found,) = diagnose(raised("step 12", "[rank11]: RuntimeError: Connection closed by peer [10.0.0.1]:45283"))
    assert found.found == (
        "rank 11 (worker on gpu2) raised ValueError: bad label (/data/train.py, line 15); "
        "master on gpu1 then lost the connection"
    )


def test_an_exception_that_a_rule_knows_is_diagnosed_by_the_rule() -> None:
    missing = STACK.replace("ValueError: bad label", "ModuleNotFoundError: No module named 'flash'")
    assert [one.key for one in diagnose(raised(*missing.splitlines(), traceback=missing))] == ["module-missing"]
    lost = STACK.replace("ValueError: bad label", "RuntimeError: Connection closed by peer [10.0.0.1]:45283")
    assert [one.key for one in diagnose(raised(*lost.splitlines(), traceback=lost))] == ["peer-died"]


def test_each_reason_for_a_failed_task_has_a_diagnosis() -> None:
    explained_elsewhere = {
        Reason.EXIT_CODE: "by its output",
        Reason.SIGNAL: "by the signal",
        Reason.PEER_FAILED: "by the task that failed first",
        Reason.UPSTREAM: "in the group that failed",
        Reason.CANCELED: "a user did it",
        Reason.SUBMISSION: "never ran",
        Reason.PREEMPTED: "never set",
    }
    for reason in set(Reason) - set(explained_elsewhere):
        first = "exit code 127: whatever it was"
        diagnoses = diagnose(
            group_outcome("step 12", other="step 12", first=first, reason=reason, kernel=("Killed process 9",))
        )
        assert diagnoses, reason
        assert diagnoses[0].remedy
        assert "worker on gpu2: exit code 127" in diagnoses[0].found, "the message is not repeated"
