"""The environment variables that a task gets, and those that it must not get."""

from __future__ import annotations

import pytest

from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.plan.environment import task_environment
from distflow.spec.model import ResourceSpec


def _environment(size: int = 8, tasks: int = 2, resource: ResourceSpec | None = None, **given: str) -> dict[str, str]:
    members = tuple(TaskRanks(task=f"t{i}", offset=i * size, size=size, node_rank=i) for i in range(tasks))
    world = WorldLayout(world_size=size * tasks, tasks=members, style="ranks")
    return task_environment(
        group="g", task="t1", ranks=members[1], world=world, resource=resource or ResourceSpec(), given=given
    )


def test_torchrun_gets_its_options_from_variables() -> None:
    environment = _environment()
    assert {name: environment[name] for name in environment if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": "@@MASTER_ADDR@@",
        "PET_MASTER_PORT": "@@MASTER_PORT@@",
    }


def test_a_task_of_several_ranks_has_no_variables_of_one_rank() -> None:
    # With them, `python train.py` would join the world of 16 ranks as one process, and hang.
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & set(_environment())


def test_a_task_of_one_rank_has_the_variables_of_this_rank() -> None:
    environment = _environment(size=1)
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("1", "0", "2")


def test_the_layout_is_in_variables_of_distflow() -> None:
    environment = _environment()
    assert environment["DISTFLOW_RANK_OFFSET"] == "8"
    assert environment["DISTFLOW_RANK_SIZE"] == "8"
    assert environment["DISTFLOW_WORLD_SIZE"] == "16"


@pytest.mark.parametrize(
    ("gpu", "expected"), [(None, None), (0, "@@GPU_IDS@@"), (4, "@@GPU_IDS@@")], ids=["not set", "none", "four"]
)
def test_visible_gpus_are_restricted_if_the_spec_has_a_number_of_gpus(gpu: int | None, expected: str | None) -> None:
    assert _environment(resource=ResourceSpec(gpu=gpu)).get("CUDA_VISIBLE_DEVICES") == expected


def test_threads_are_shared_among_the_processes() -> None:
    assert _environment(resource=ResourceSpec(cpu=32))["OMP_NUM_THREADS"] == "4"
    assert _environment()["OMP_NUM_THREADS"] == "1"
    assert _environment(OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_variables_of_the_spec_override_others() -> None:
    assert _environment(MASTER_PORT="29500", NCCL_SOCKET_IFNAME="ib0")["MASTER_PORT"] == "29500"


def test_a_task_without_a_world_has_no_variables_of_a_world() -> None:
    environment = task_environment(group="g", task="t", ranks=None, world=None, resource=ResourceSpec(), given={})
    assert not {name for name in environment if name.startswith(("PET_", "MASTER_", "NCCL_", "RANK", "WORLD"))}


def test_debug_sets_the_variable_of_torch_unless_the_spec_sets_it() -> None:
    def environment_with(*, debug: bool, **given: str) -> dict[str, str]:
        return task_environment(group="g", task="t", ranks=None, world=None, resource=ResourceSpec(), given=given, debug=debug)

    assert environment_with(debug=True)["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert environment_with(debug=True)["DISTFLOW_DEBUG"] == "1"
    assert environment_with(debug=True, TORCH_DISTRIBUTED_DEBUG="INFO")["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert not {name for name in environment_with(debug=False) if "DEBUG" in name or "TORCH_" in name}


def test_the_path_of_the_checkpoint_is_a_variable_unless_the_spec_sets_it() -> None:
    def environment_with(checkpoint: str | None, **given: str) -> dict[str, str]:
        return task_environment(
            group="g", task="t", ranks=None, world=None, resource=ResourceSpec(), given=given, checkpoint=checkpoint
        )

    assert "DISTFLOW_CHECKPOINT" not in environment_with(None)
    assert environment_with("work/ckpt")["DISTFLOW_CHECKPOINT"] == "@@ATTEMPT_DIR@@/work/ckpt"
    assert environment_with("work/ckpt", DISTFLOW_CHECKPOINT="/scratch")["DISTFLOW_CHECKPOINT"] == "/scratch"
