"""The meaning of Slurm's states and reasons."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from distflow.backends.allocated.engine import AllocationState, Over, Queued
from distflow.backends.allocated.slurm.job_ends import JobEnd, job_end_command
from distflow.backends.allocated.slurm.job_states import (
    ENDS,
    PHASES,
    Component,
    JobPhase,
    jobs_of,
    pending_text,
    phase_of,
    squeue_format,
    state_text,
)
from distflow.lifecycle.states import Reason

CORPORA = Path(__file__).parents[4] / "corpora"
# The states that the manual page of squeue lists (22.05 and 25.05).
STATES = (CORPORA / "slurm_states.txt").read_text().split()
# The reasons in its section "Job reason codes", without those of ended jobs.
REASONS = (CORPORA / "slurm_reasons.txt").read_text().split()


def test_every_state_of_slurm_is_known() -> None:
    assert sorted(PHASES) == sorted(STATES)
    assert {state for state, phase in PHASES.items() if phase is JobPhase.OVER} == set(ENDS)


def test_a_job_in_an_unknown_state_counts_as_queued() -> None:
    assert phase_of("DREAMING") is JobPhase.QUEUED
    assert state_text("DREAMING") == "waits (DREAMING)"


def test_every_reason_has_a_text_that_contains_it() -> None:
    assert [word for word in REASONS if not pending_text(word).endswith(f" ({word})")] == []


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Resources", "waits for free nodes (Resources)"),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "waits for nodes that are down, drained or reserved (ReqNodeNotAvail, Unav",
        ),
        ("QOSMaxGRESPerUser", "waits: the limit of the QOS on GPUs per user is reached (QOSMaxGRESPerUser)"),
        ("AssocGrpGRES", "waits: the limit of the account on GPUs is reached (AssocGrpGRES)"),
        ("AssocGrpCPURunMinutesLimit", "waits: the limit of the account on CPUs times run time is reached"),
        (
            "QOSMaxNodePerJobLimit",
            "will not start: it requests more nodes than the QOS allows for one job (QOSMaxNodePerJobLimit)",
        ),
        ("AssocMaxMemPerNode", "will not start: it requests more memory than the account allows for one node"),
        ("PartitionNodeLimit", "will not start: it requests more nodes than its partition has or allows (PartitionNodeLimit)"),
        ("Nodes required for job are DOWN", "waits: Nodes required for job are DOWN"),
        ("NewWordOf2030", "waits: NewWordOf2030"),
        ("bad\x1b[31m\nword", "waits: bad word"),
        ("", "waits"),
    ],
)
def test_the_reason_for_waiting_is_explained(reason: str, text: str) -> None:
    assert pending_text(reason).startswith(text)


# Recorded from squeue of 22.05. Comments and names may contain any text except the separator, which is random.
SEPARATOR = "<T>"
RECORDED = (
    "<T>14+0<T>14<T>PENDING<T>1795432380<T><T>Resources<T>distflow:u/g/0<T>\n"
    "<T>14+1<T>15<T>PENDING<T>N/A<T><T>None<T>distflow:u/g/0<T>\n"
    "<T>18<T>18<T>RUNNING<T>1795432683<T>n[1-2]<T>None<T>a|b\n99|RUNNING\n<T>\n"
    "<T>20_[1-3]<T>20<T>PENDING<T>N/A<T><T>Priority<T>(null)<T>\n"
)


def test_the_output_of_squeue_is_parsed_if_comments_have_any_text() -> None:
    assert squeue_format(SEPARATOR) == "<T>%i<T>%A<T>%T<T>%S<T>%N<T>%r<T>%k<T>"
    jobs = jobs_of(RECORDED, SEPARATOR)
    assert list(jobs) == ["14", "18"]
    first, second = jobs["14"]
    assert (first.offset, first.number, first.state, first.starts_at, first.reason) == (
        0,
        "14",
        "PENDING",
        1795432380.0,
        "Resources",
    )
    assert (second.offset, second.number, second.starts_at, second.comment) == (1, "15", None, "distflow:u/g/0")
    assert (jobs["18"][0].hosts, jobs["18"][0].comment) == ("n[1-2]", "a|b\n99|RUNNING\n")
    assert jobs_of("", SEPARATOR) == {}


@pytest.mark.parametrize(
    "text", ["hello", "<T>1<T>1<T>PENDING", RECORDED[:60], "warning\n" + RECORDED, RECORDED.replace("\n<T>18", "x<T>18")]
)
def test_malformed_output_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="requested format"):
        jobs_of(text, SEPARATOR)


# Recorded from scontrol of 22.05, shortened; `FailedNode` is from newer versions.
SCONTROL_OUTPUT = (
    "JobId={job} JobName=sbatch UserId=root(0) JobState={state} Reason={reason} Dependency=(null) Requeue=0 "
    "ExitCode={code} RunTime=00:00:00 TimeLimit=00:01:00 TimeMin=N/A NodeList=n[1-2] BatchHost=n1 {more} Power= \n"
)


def component(state: str, hosts: str = "n[1-2]", offset: int = 0) -> Component:
    return Component(job="5", offset=offset, number="5", state=state, starts_at=None, hosts=hosts, reason="None", comment="")


def ended(
    state: str, *, reason: str = "None", code: str = "0:0", more: str = "", accounting: str = "", by: str = "", log: str = ""
) -> AllocationState | None:
    output = SCONTROL_OUTPUT.format(job=5, state=state, reason=reason, code=code, more=more)
    return JobEnd(output, accounting, by, log).state_of("5", [component(state)], {"n2", "n7"})


@pytest.mark.parametrize("state", ENDS)
def test_every_end_has_a_message(state: str) -> None:
    found = ended(state)
    assert isinstance(found, Over)
    assert found.reason is ENDS[state][0]
    assert found.message.startswith(f"Slurm job 5 {ENDS[state][1]}")


def test_messages_about_ends_name_the_causes() -> None:
    assert ended("TIMEOUT", reason="TimeLimit") == Over(
        reason=Reason.EXEC_TIMEOUT, message="Slurm job 5 reached its time limit of 60 s"
    )
    accounting = "CANCELLED by 1000|0:0|n1"  # codespell:ignore
    assert ended("CANCELLED", accounting=accounting, by="alice\x1b[0m") == Over(  # codespell:ignore
        reason=Reason.CANCELED, message="Slurm job 5 was canceled by alice with `scancel`"
    )
    assert ended("NODE_FAIL") == Over(reason=Reason.NODE_LOST, message="Slurm job 5 lost a node (n2)", hosts=("n2",))
    assert ended("NODE_FAIL", more="FailedNode=n1") == Over(
        reason=Reason.NODE_LOST, message="Slurm job 5 lost a node (n1)", hosts=("n1",)
    )
    assert ended("FAILED", reason="NonZeroExitCode", code="127:0", log="srun: error: execve(): /no/python\n\n") == Over(
        reason=None, message="Slurm job 5 failed with exit code 127: srun: error: execve(): /no/python", is_failure=True
    )
    log = "srun: Job step aborted\nslurmstepd-n2: error: StepId=5.0 exceeded memory limit (7 > 3), being killed\n"
    assert ended("FAILED", reason="NonZeroExitCode", code="137:0", log=log) == Over(
        reason=Reason.OOM_KILLED, message="Slurm job 5 used more memory than it requested on n2", hosts=("n2",)
    )
    assert ended("FAILED", code="1:0", log="srun: error: n1: task 0: Out Of Memory\n") == Over(
        reason=Reason.OOM_KILLED, message="Slurm job 5 used more memory than it requested on n1", hosts=("n1",)
    )
    log = "srun: error: Unable to create step for job 5: Job/step already completing or completed\n"
    found = ended("FAILED", code="1:0", log=log)
    assert isinstance(found, Over)
    assert not found.is_failure
    log = "srun: error: Unable to create step for job 5: Invalid generic resource (gres) specification\n"
    for granted, is_failure in (("gpu:h100:0", False), ("gpu:h100:4", True)):
        found = ended("FAILED", code="1:0", more=f"JOB_GRES={granted}   Nodes=n[1-2] GRES= MinCPUsNode=1", log=log)
        assert isinstance(found, Over)
        assert found.is_failure == is_failure
    assert ended("FAILED", reason="BadConstraints", code="0:1") == Over(
        reason=None, message="Slurm job 5 failed with signal 1 (BadConstraints)", is_failure=True
    )


def test_the_most_severe_component_explains_a_heterogeneous_job() -> None:
    components = [component("CANCELLED", "n1"), component("NODE_FAIL", "n2", 1)]  # codespell:ignore
    found = JobEnd("", "", "", "").state_of("5", components, {"n2"})
    assert found == Over(reason=Reason.NODE_LOST, message="Slurm job 5 lost a node (n2)", hosts=("n2",))


def test_a_job_that_slurm_has_forgotten_is_over() -> None:
    unknown = "slurm_load_jobs error: Invalid job id specified\n"
    assert JobEnd(unknown, "", "", "").state_of("5", [], ()) == Over(reason=None, message="Slurm no longer knows job 5")
    assert JobEnd(unknown, "TIMEOUT|0:0|n1", "", "").state_of("5", [], ()) == Over(
        reason=Reason.EXEC_TIMEOUT, message="Slurm job 5 reached its time limit"
    )
    assert JobEnd("slurm_load_jobs error: Unable to contact slurm controller", "", "", "").state_of("5", [], ()) is None


def test_a_job_that_was_submitted_after_the_query_waits() -> None:
    output = SCONTROL_OUTPUT.format(job=5, state="PENDING", reason="None", code="0:0", more="")
    assert isinstance(JobEnd(output, "", "", "").state_of("5", [], ()), Queued)


def test_the_node_of_an_out_of_memory_job_is_known_if_its_message_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, scontrol = tmp_path / "distflow-job-7.log", tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\necho 'JobId=7 JobState=OUT_OF_MEMORY Reason=OutOfMemory '\n"
        f"(sleep 0.3; echo 'slurmstepd-n2: error: Detected 1 oom_kill event' > {log}) > /dev/null 2>&1 &\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(job_end_command("<x>", str(tmp_path), ["7"]), capture_output=True, text=True, check=True)
    state = JobEnd(*(part.strip() for part in done.stdout.split("<x>")[:4])).state_of("7", (), ())
    assert isinstance(state, Over)
    assert state.hosts == ("n2",)
    assert not log.exists()
