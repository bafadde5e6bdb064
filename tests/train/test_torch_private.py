"""Private names of torch: this version of torch has them, and only one module uses them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info

from distflow.train.torch_private import named_groups, recorded_collectives, set_worker_dataset

pytestmark = pytest.mark.torch


@pytest.fixture
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
def test_process_groups_and_their_collectives_are_listed() -> None:
    group = dist.new_group([0], group_desc="mine")
    dist.all_reduce(torch.ones(3), group=group)
    ((name, ranks),) = [(name, ranks) for name, one, ranks in named_groups() if one.group_desc == "mine"]
    assert ranks == [0]
    (entry,) = [entry for entry in recorded_collectives() if entry["process_group"][0] == name]
    assert entry["profiling_name"] == "gloo:all_reduce"
    assert {"record_id", "collective_seq_id", "is_p2p", "retired", "state"} <= set(entry)


class InnerDataset(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        return int(info is not None and str(info.dataset) == "another")


def initialize_worker(_worker: int) -> None:
    set_worker_dataset("another")


def test_a_worker_can_replace_the_dataset_in_its_worker_info() -> None:
    assert next(iter(DataLoader(InnerDataset(), num_workers=1, worker_init_fn=initialize_worker))).tolist() == [1]


def test_only_one_module_uses_private_names(repository: Path) -> None:
    private = re.compile(
        r"\btorch(\.\w+)*\._[a-zA-Z]|\b(distributed_c10d|dist)\._[a-z]|^from torch[\w.]* import .*\b_[a-z]", re.MULTILINE
    )
    users = [path.name for path in (repository / "src/distflow/train").rglob("*.py") if private.search(path.read_text())]
    assert users == ["torch_private.py"]
