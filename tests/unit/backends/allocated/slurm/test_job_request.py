"""The options and scripts of ``sbatch`` as golden files, and the meaning of its refusals.

``DISTFLOW_RENEW_GOLDENS=1 pytest tests/unit/backends/allocated`` writes the files again; the diff then shows the changes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from distflow.backends.allocated.engine import Allocation, AllocationRequest, NodeRequest, RequestRefused
from distflow.backends.allocated.slurm.job_request import (
    as_one_shape,
    components_of,
    container_options,
    is_temporary,
    job_script,
    lacks_het_jobs,
    log_path,
    refusal,
    sbatch_arguments,
)
from distflow.pools.load import Machine, parse_configuration
from distflow.pools.model import Pool
from distflow.shell import quote
from distflow.transports.base import Completed

GOLDENS = Path(__file__).parents[4] / "goldens" / "slurm"
GI = 1 << 30


def pool_of(slurm: str) -> Pool:
    text = f"pools: {{cluster: {{backend: slurm, {slurm}}}}}"
    return parse_configuration(text, "distflow.yaml", root="/r", machine=Machine(cpus=1, memory=1, gpus=0, python="p")).pools[
        "cluster"
    ]


def request_for(*nodes: NodeRequest, time_limit_s: float | None = None) -> AllocationRequest:
    return AllocationRequest(
        allocation=Allocation(workflow="7278eb", group="train", attempt=2),
        label="lm-3/train",
        nodes=nodes,
        time_limit_s=time_limit_s,
    )


def workers(count: int, **shape: object) -> list[NodeRequest]:
    return [NodeRequest(task=f"worker-{number}", **shape) for number in range(count)]  # type: ignore[arg-type]


CASES = {
    "smallest": ("slurm: {}", request_for(NodeRequest(task="main"))),
    "gang": (
        (
            "slurm: {partition: gpu, account: lab, qos: high, constraint: 'h100&ib', reservation: week, exclusive: true, "
            "time: 8h, gres: 'gpu:h100', extra: [--licenses=matlab, '-x n7', '--mail-user=a b']}"
        ),
        request_for(*workers(4, gpus=8, cpus=96, memory=500 * GI + 1, excluded=("n3", "n9"))),
    ),
    "limit_of_the_spec": ("slurm: {time: 8h}", request_for(*workers(2, gpus=1), time_limit_s=601)),
    "platform": (
        "slurm: {partition: gpu, gres: 'gpu:a100'}, platforms: {h100: {partition: big, constraint: h100, gres: 'gpu:h100'}}",
        request_for(*workers(2, gpus=8, platform="h100")),
    ),
    "gpus_per_task": (
        "slurm: {gpu_option: gpus-per-task}, platforms: {h100: {gres: 'gpu:h100'}}",
        request_for(*workers(2, gpus=4), NodeRequest(task="large", gpus=8, platform="h100")),
    ),
    "image": (
        "root: /scratch/a b, slurm: {container: pyxis}",
        request_for(*workers(2, gpus=8, image="nvcr.io/nvidia/pytorch:24.03-py3", mounts=("/data", "/a's:/b"))),
    ),
    "heterogeneous": (
        "slurm: {account: lab}, platforms: {cpu: {partition: cpu}}",
        request_for(NodeRequest(task="master", cpus=4, platform="cpu"), *workers(2, gpus=8, memory=64 * GI)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_command_matches_the_golden_file(name: str) -> None:
    configured, request = CASES[name]
    pool = pool_of(configured)
    assert pool.template is not None
    components = components_of(request.nodes)
    command = sbatch_arguments(pool, request, components)
    resident = f"#!/bin/sh\nexec srun resident {len(components)}\n"
    text = (
        quote(command).replace(" --", " \\\n  --").replace(" : ", " \\\n  : ")
        + "\n\n"
        + job_script(pool.template.root, resident, container_options(pool, request)).decode()
    )
    golden = GOLDENS / f"{name}.sh"
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text


def test_a_label_cannot_change_the_command() -> None:
    request = request_for(NodeRequest(task="t"))
    bad = AllocationRequest(allocation=request.allocation, label="x\n--wrap=evil\x1b[0m", nodes=request.nodes)
    assert "--job-name=x --wrap=evil" in sbatch_arguments(pool_of("slurm: {}"), bad, [request.nodes])


def test_consecutive_tasks_of_one_shape_are_one_component() -> None:
    nodes = [NodeRequest(task="m"), *workers(3, gpus=1), NodeRequest(task="z", gpus=1, excluded=("n1",)), NodeRequest(task="e")]
    assert [len(component) for component in components_of(nodes)] == [1, 4, 1]


def test_without_heterogeneous_jobs_all_nodes_have_the_largest_shape() -> None:
    nodes = as_one_shape([NodeRequest(task="m", cpus=9, memory=1), NodeRequest(task="w", gpus=2, cpus=3, excluded=("n1",))])
    assert [(node.task, node.gpus, node.cpus, node.memory, node.excluded) for node in nodes] == [
        ("m", 2, 9, 1, ()),
        ("w", 2, 9, 1, ("n1",)),
    ]
    with pytest.raises(RequestRefused, match="different platforms"):
        as_one_shape([NodeRequest(task="m", platform="a"), NodeRequest(task="w")])


def test_images_need_pyxis_and_must_be_equal() -> None:
    mixed = request_for(*workers(1, image="a"), *workers(1))
    for pool in (pool_of("slurm: {}"), pool_of("container: apptainer, slurm: {container: pyxis}")):
        assert container_options(pool, mixed) == ()
    assert container_options(pool_of("slurm: {container: pyxis}"), request_for(*workers(2))) == ()
    with pytest.raises(RequestRefused, match="only some tasks of group `train` have an `image`, but one `srun` starts all"):
        container_options(pool_of("slurm: {container: pyxis}"), mixed)
    with pytest.raises(RequestRefused, match="the tasks of group `train` have different images, but one `srun` starts all"):
        container_options(pool_of("slurm: {container: pyxis}"), request_for(*workers(1, image="a"), *workers(1, image="b")))


def test_a_platform_must_be_known() -> None:
    request = request_for(*workers(1, platform="h10"))
    with pytest.raises(RequestRefused, match="pool `cluster` has no platform `h10`") as caught:
        sbatch_arguments(pool_of("platforms: {h100: {}}"), request, [request.nodes])
    assert caught.value.hint.startswith("did you mean `h100`?")
    with pytest.raises(RequestRefused) as caught:
        sbatch_arguments(pool_of("slurm: {}"), request, [request.nodes])
    assert caught.value.hint == "add for example `platforms: {h10: {constraint: h10}}` to the pool"


def failed_with(text: str) -> Completed:
    return Completed(exit_code=1, stdout=b"", stderr=text.encode())


FAILED = "sbatch: error: Batch job submission failed: "
POLICY = FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        # Recorded on Slurm 22.05.
        (f"sbatch: error: invalid partition specified: nope\n{FAILED}Invalid partition name specified\n", "slurm.partition"),
        (f"{FAILED}Invalid generic resource (gres) specification\n", "slurm.gres"),
        (f"{FAILED}Requested node configuration is not available\n", "request less"),
        (
            f"sbatch: error: Memory specification can not be satisfied\n{FAILED}Requested node configuration is not",
            "less memory",
        ),
        (f"{FAILED}Invalid feature specification\n", "slurm.constraint"),
        (f"{FAILED}Requested reservation is invalid\n", "slurm.reservation"),
        ("sbatch: unrecognized option '--nope'\nTry \"sbatch --help\" for more information\n", "slurm.extra"),
        # From the sources of Slurm.
        (f"{FAILED}Invalid account or account/partition combination specified\n", "slurm.account"),
        (f"{FAILED}Invalid qos specification\n", "slurm.qos"),
        (f"{FAILED}User's group not permitted to use this partition\n", "slurm.partition"),
        (f"{FAILED}Node count specification invalid\n", "fewer nodes"),
        (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)\n", "exec_timeout"),
        ("sbatch: error: QOSMaxNodePerJobLimit\n" + POLICY, "request less"),
        ("sbatch: error: lua: state your project\n" + FAILED + "Unspecified error\n", "the pool's `slurm`"),
    ],
)
def test_final_refusals_quote_slurm_and_have_a_remedy(text: str, hint: str) -> None:
    assert not is_temporary(failed_with(text))
    assert not lacks_het_jobs(failed_with(text))
    error = refusal(failed_with(text))
    assert error.message.startswith("Slurm refused the job: ")
    assert text.split("\n", maxsplit=1)[0].removeprefix("sbatch: ").removeprefix("error: ")[:40] in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    "text",
    [
        f"{FAILED}Unable to contact slurm controller (connect failure)\n",
        f"{FAILED}Socket timed out on send/recv operation\n",
        f"{FAILED}Resource temporarily unavailable\n",
        f"{FAILED}Slurm temporarily unable to accept job, sleeping and retrying\n",
        f"{FAILED}Required partition not available (inactive or drain)\n",
        f"{FAILED}Zero Bytes were transmitted or received\n",
        f"{FAILED}Protocol authentication error\n",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\n" + POLICY,
        "sbatch: error: AssocGrpSubmitJobsLimit\n" + POLICY,
        POLICY,
    ],
)
def test_temporary_refusals_are_recognized(text: str) -> None:
    assert is_temporary(failed_with(text))


def test_a_cluster_without_heterogeneous_jobs_is_recognized() -> None:
    assert lacks_het_jobs(failed_with(f"{FAILED}Requested operation not supported on this system\n"))  # 22.05, sched/builtin


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("~/.distflow", "~/.distflow/distflow-job-7.log"),
        ("~", "~/distflow-job-7.log"),
        ("~me/x y", "~me'/x y'/distflow-job-7.log"),
        ("/a b/$(c)/", "'/a b/$(c)'/distflow-job-7.log"),
    ],
)
def test_the_log_of_a_job_is_in_the_root(root: str, path: str) -> None:
    assert log_path(root, "7") == path


@pytest.mark.parametrize(
    ("resident", "code", "kept"),
    [("exit 0", 0, None), ("echo cannot start >&2; exit 127", 127, "cannot start\n"), ("exec true", 0, None)],
)
def test_the_script_keeps_messages_only_after_a_failure(tmp_path: Path, resident: str, code: int, kept: str | None) -> None:
    root = tmp_path / "a b"
    script = job_script(str(root), f"#!/bin/sh\n{resident}\n")
    assert (
        subprocess.run(["sh"], input=script, env={"SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}, check=False).returncode
        == code
    )
    log = root / "distflow-job-7.log"
    assert (log.read_text() if log.exists() else None) == kept
    if kept:
        assert log.stat().st_mode & 0o777 == 0o600


def test_the_script_runs_where_its_root_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = job_script(str(tmp_path / "file" / "root"), "#!/bin/sh\nexit 3\n")
    done = subprocess.run(
        ["sh"], input=script, env={"SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")
    assert Path("/dev/null").is_char_device()  # the script did not replace or remove it
