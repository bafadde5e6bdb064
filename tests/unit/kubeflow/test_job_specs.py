"""Specs of jobs: ranks, resources, packages and options; and arguments that are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from distflow.api.spec import Resources, Spec
from distflow.kubeflow import (
    CustomTrainer,
    CustomTrainerContainer,
    Initializer,
    S3DatasetInitializer,
    SSHBackendConfig,
    TrainerClient,
)
from distflow.kubeflow.job_specs import job_spec, read_options, required_packages
from distflow.kubeflow.options import ActiveDeadlineSeconds, Annotations, TrainerArgs, TrainerCommand
from distflow.kubeflow.runtimes import RUNTIMES, runtime_in, runtime_name
from distflow.plan.frameworks import FRAMEWORKS
from distflow.pools.model import ContainerRuntime, Node, Pool


def _train() -> None:
    """Train nothing."""


def _pool(*, backend: str = "ssh", container: ContainerRuntime = "none", gpus: int | None = None) -> Pool:
    node = Node(name="gpu1", host="gpu1", root="~/.distflow", python="python3", container=container, gpus=gpus)
    return Pool(name="lab", backend=backend, nodes=(node,))


def _spec(pool: Pool | None = None, runtime: str = "torch-distributed", **fields: Any) -> Spec:
    return job_spec("job", runtime, CustomTrainer(func=_train, **fields), read_options(None), pool or _pool())


@pytest.mark.parametrize(
    ("resources", "ranks", "reserved"),
    [
        (None, 1, Resources()),
        ({"gpu": 4}, 4, Resources(gpu=4)),
        ({"nvidia.com/gpu": "2", "CPU": "500m", "memory": "16Gi"}, 2, Resources(gpu=2, cpu=1, memory="16Gi")),
        ({"cpu": 2, "storage": "1Ti"}, 1, Resources(cpu=2, storage="1Ti")),
    ],
)
def test_each_node_has_one_rank_for_each_gpu(resources: dict[str, Any] | None, ranks: int, reserved: Resources) -> None:
    spec = _spec(num_nodes=3, resources_per_node=resources)
    (task,) = spec.groups[0].tasks
    assert task.ranks is not None
    assert (task.replicas, task.ranks.size, spec.resources["default"]) == (3, ranks, reserved)
    assert spec.groups[0].launcher == "torchrun"


def test_the_nodes_of_a_job_on_one_machine_do_not_reserve_its_cpus() -> None:
    spec = _spec(_pool(backend="local"), resources_per_node={"cpu": 5, "memory": "16Gi", "gpu": 1})
    assert spec.resources["default"] == Resources(gpu=1)


def test_frameworks_other_than_torch_start_as_in_specs() -> None:
    assert {one.framework for one in RUNTIMES.values() if one.framework} == {*FRAMEWORKS} - {"pytorch"}
    group = _spec(runtime="jax-distributed", resources_per_node={"gpu": 8}).groups[0]
    assert (group.framework, group.launcher, group.tasks[0].ranks) == ("jax", None, _spec().groups[0].tasks[0].ranks)
    trainer = runtime_in(_pool(gpus=8), "jax-distributed").trainer
    assert (trainer.framework, trainer.device, trainer.device_count) == ("jax", "gpu", "8")
    with pytest.raises(ValueError, match=r"(?s)no runtime `torch-distribute`.*did you mean `torch-distributed`"):
        runtime_name("torch-distribute")


def test_packages_become_the_lines_of_a_requirements_file() -> None:
    def lines(runtime: str = "torch-distributed", **fields: Any) -> list[str]:
        return required_packages(runtime, CustomTrainer(func=_train, **fields))

    assert lines() == []
    assert lines(packages_to_install=["transformers[sentencepiece]>=5"]) == ["torch", "transformers[sentencepiece]>=5"]
    assert lines(packages_to_install=["Torch==2.6", "x"]) == ["Torch==2.6", "x"]
    assert lines("custom-distributed", packages_to_install=["x"], pip_index_urls=["https://a/simple", "https://b/simple"]) == [
        "--index-url https://a/simple", "--extra-index-url https://b/simple", "x",
    ]  # fmt: skip


def test_a_container_runs_its_command_on_each_node() -> None:
    options = read_options([TrainerCommand(["torchrun", "train.py"]), TrainerArgs(["{{ x }}"]), ActiveDeadlineSeconds(60)])
    trainer = CustomTrainerContainer(image="pytorch/pytorch", num_nodes=2, resources_per_node={"gpu": 2})
    (group,) = job_spec("job", "torch-distributed", trainer, options, _pool(container="docker")).groups
    (task,) = group.tasks
    assert (task.image, task.command, task.args) == (
        "pytorch/pytorch",
        ["torchrun", "train.py"],
        ["{% raw %}{{{% endraw %} x }}"],
    )
    assert group.launcher is None
    assert group.timeout is not None
    assert group.timeout.exec_timeout == 60
    with pytest.raises(ValueError, match="the pool `lab` has nodes that do not run containers"):
        job_spec("job", "torch-distributed", trainer, options, _pool())
    with pytest.raises(ValueError, match="needs the option TrainerCommand"):
        job_spec("job", "torch-distributed", trainer, read_options(None), _pool())
    with pytest.raises(ValueError, match="TrainerCommand and TrainerArgs need a CustomTrainerContainer"):
        job_spec("job", "torch-distributed", CustomTrainer(func=_train), options, _pool())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"resources_per_node": {"google.com/tpu": 4}}, "distflow does not know `google.com/tpu`"),
        ({"resources_per_node": {"gpu": 0.5}}, "`gpu` is 0.5: the number of GPUs must be a whole number"),
        ({"resources_per_node": {"gpu": "two"}}, "is not a valid quantity: write a whole number, such as 4"),
        ({"resources_per_node": {"cpu": "many"}}, "`cpu` is 'many', which is not a valid quantity"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _spec(**fields)


def test_wrong_arguments_of_the_client_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = TrainerClient()
    with pytest.raises(ValueError, match=r"`trainer` is `None`: pass CustomTrainer"):
        client.train()
    with pytest.raises(ValueError, match="does not run Kubeflow's initializers"):
        client.train(initializer=Initializer(dataset=S3DatasetInitializer("s3://b/d")), trainer=CustomTrainer(func=_train))
    with pytest.raises(ValueError, match="`Annotations` is not supported"):
        client.train(trainer=CustomTrainer(func=_train), options=[Annotations({})])
    with pytest.raises(ValueError, match="`'lab'` is not a backend configuration"):
        TrainerClient("lab")
    with pytest.raises(ValueError, match="there is no pool `lab`"):
        TrainerClient(SSHBackendConfig(pool="lab"))
    with pytest.raises(ValueError, match="there is no TrainJob x"):
        client.get_job("x")
    with pytest.raises(ValueError, match=r"there is no TrainJob \*"):
        client.get_job("*")
    for wrong, message in (
        ({"status": {"Completed"}}, "give a subset"),
        ({"timeout": 0}, "timeout is 0"),
        ({"polling_interval": 0}, "polling_interval is 0"),
        ({"polling_interval": 10, "timeout": 10}, "less than timeout"),
    ):
        with pytest.raises(ValueError, match=message):
            client.wait_for_job_status("x", **wrong)
    assert client.list_jobs() == []


def test_the_import_loads_no_other_module_of_distflow() -> None:
    program = "import sys; import distflow; before = {*sys.modules}; import distflow.kubeflow; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith("distflow")] == ["distflow.kubeflow"]
