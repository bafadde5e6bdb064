"""Programs for Kubeflow's ``TrainerClient`` with one changed import, on this machine and on hosts behind SSH."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import distflow
from distflow.client.client import Client
from distflow.client.workflows import find_workflow, plan_of
from distflow.kubeflow import CustomTrainer, LocalProcessBackendConfig, SSHBackendConfig, TrainerClient, TrainJob
from distflow.kubeflow.options import Labels, Name
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab
from scenarios.lasting import lasting_supervisor

README = """
from kubeflow.trainer import CustomTrainer, TrainerClient, TrainJobTemplate


def average(learning_rate: str, num_epochs: str):
    import os

    import torch.distributed as dist

    dist.init_process_group(backend="gloo")
    print(f"RANK {dist.get_rank()} of WORLD_SIZE {dist.get_world_size()}, LOCAL_RANK {os.environ['LOCAL_RANK']}")
    if dist.get_rank() == 0:
        print(f"loss={1.0 - float(learning_rate) * int(num_epochs)} $(RANK)")
        open("{{output}}/model.txt", "w").write("trained")
    dist.barrier()
    dist.destroy_process_group()


template = TrainJobTemplate(
    runtime="torch-distributed",
    trainer=CustomTrainer(
        func=average,
        func_args={"learning_rate": "0.01", "num_epochs": "5"},
        num_nodes=3,
        resources_per_node={"cpu": 2},
    ),
)
job_id = TrainerClient().train(**template)
job = TrainerClient().wait_for_job_status(job_id)
lines = list(TrainerClient().get_job_logs(name=job_id))
"""

GETTING_STARTED = """
from kubeflow.trainer import CustomTrainer, TrainerClient


def train_pytorch(epochs, text):
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    dist.init_process_group(backend=backend)
    local_rank = int(os.getenv("LOCAL_RANK", 0))
    print(f"WORLD_SIZE: {dist.get_world_size()}, RANK: {dist.get_rank()}, {text}, {os.environ['MODE']}")
    torch.manual_seed(0)
    data = TensorDataset(inputs := torch.randn(64, 4), inputs.sum(1, keepdim=True))
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, target in DataLoader(data, batch_size=16, sampler=sampler):
            loss = torch.nn.functional.mse_loss(model(batch.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    weights = [weight.detach() for weight in model.parameters()]
    print(f"weight {weights[0].sum().item():.6f} on {local_rank}")
    del model  # torch may hang if the model has the last reference to the group: pytorch/pytorch#56297
    dist.destroy_process_group()


client = TrainerClient()
runtime = next(one for one in client.list_runtimes() if one.name == "torch-distributed")
job_name = client.train(
    runtime=runtime,
    trainer=CustomTrainer(
        func=train_pytorch,
        func_args={"epochs": 3, "text": "a {{ b }} {% c %}"},
        num_nodes=2,
        resources_per_node={"cpu": 5, "memory": "16Gi"},
        env={"PET_NPROC_PER_NODE": "2", "MODE": "$(HOME) {% y"},
    ),
)
client.wait_for_job_status(name=job_name, status={"Running"})
steps = client.get_job(name=job_name).steps
lines = list(client.get_job_logs(job_name, follow=True))
client.wait_for_job_status(name=job_name, status={"Complete", "Failed"}, timeout=120)
"""


@pytest.fixture(autouse=True)
def _environment_of_cli(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTFLOW_STATE", "DISTFLOW_CONFIG", "HOME"):
        monkeypatch.setenv(name, cli.environment[name])
    monkeypatch.chdir(cli.folder)


def _run(folder: Path, program: str) -> dict[str, object]:
    """Run a program of Kubeflow with one changed import, and return its variables."""
    path = folder / "program.py"
    path.write_text(program.replace("from kubeflow.trainer import", "from distflow.kubeflow import"))
    return runpy.run_path(str(path))


def _check_programs(cli: Cli) -> None:
    """Run both programs, and check their jobs, logs and outputs."""
    found = _run(cli.folder, README)
    job = found["job"]
    assert isinstance(job, TrainJob)
    assert (job.status, [(step.name, step.status) for step in job.steps]) == (
        "Complete",
        [("node-0", "Succeeded"), ("node-1", "Succeeded"), ("node-2", "Succeeded")],
    )
    assert found["lines"] == ["RANK 0 of WORLD_SIZE 3, LOCAL_RANK 0", "loss=0.95 $(RANK)"]
    distflow.get(job.name).fetch("model.txt", to="models", task="node-0")
    assert Path("models/model.txt").read_text() == "trained"
    found = _run(cli.folder, GETTING_STARTED)
    steps, lines = found["steps"], found["lines"]
    assert isinstance(steps, list)
    assert isinstance(lines, list)
    assert [(step.name, step.device) for step in steps] == [("node-0", "cpu"), ("node-1", "cpu")]
    hello = "WORLD_SIZE: 4, RANK: {}, a {{{{ b }}}} {{% c %}}, $(HOME) {{% y"
    assert sorted(lines)[:2] == [hello.format(0), hello.format(1)]
    others = [*TrainerClient().get_job_logs(str(found["job_name"]), "node-1")]
    trained = {line.partition(" on ")[0] for line in [*lines, *others] if line.startswith("weight")}
    assert len(trained) == 1, "all ranks have the same weights"
    jobs = TrainerClient().list_jobs(TrainerClient().get_runtime("torch-distributed"))
    assert [job.name for job in jobs] == [found["job_name"], job.name]
    assert cli.run("workflow", "list", "--label", f"kubeflow-trainjob={job.name}").out.count(f"{job.name}-1") == 1


@pytest.mark.torch
def test_the_examples_of_kubeflow_run_on_this_machine(cli: Cli, forking_site: str) -> None:
    cli.configure(cpus=1, environment={"PYTHONPATH": forking_site})
    with lasting_supervisor(cli):
        _check_programs(cli)


@pytest.mark.torch
@pytest.mark.ssh
def test_the_examples_of_kubeflow_run_on_hosts_behind_ssh(lab: Lab, forking_site: str) -> None:
    node = {"cpus": 8, "memory": "64Gi"}
    lab.configure(nodes=dict.fromkeys(lab.servers, node), environment={"PYTHONPATH": forking_site})
    with lasting_supervisor(lab.cli):
        _check_programs(lab.cli)
        client = TrainerClient(SSHBackendConfig(hosts=["gpu1", "gpu2"]))
        with pytest.raises(ValueError, match=r"(?s)can never run in pool .lab.*node-2: gpu2: used by node-1"):
            client.train(trainer=CustomTrainer(func=_sleep, num_nodes=3))
        name = client.train("custom-distributed", trainer=CustomTrainer(func=_sleep, num_nodes=2))
        wait_until(lambda: client.get_job(name).status == "Running", what="the job runs")
        assert {task.node for task in distflow.get(name).tasks} == {"gpu1", "gpu2"}
        client.delete_job(name)


def _fail_on_rank_1(text: str) -> None:
    import os
    import sys

    sys.stdout.write(f"{text}\n")
    if os.environ["RANK"] == "1":
        raise KeyError("bad label")


def _sleep() -> None:
    import signal
    import sys

    sys.stdout.write("here\n")
    sys.stdout.flush()
    signal.pause()


def test_failed_running_and_deleted_jobs_are_reported_as_kubeflow_does(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    client = TrainerClient(backend_config=LocalProcessBackendConfig())
    client.get_runtime_packages(client.get_runtime("torch-distributed"))
    assert capsys.readouterr().out.startswith("Python: 3.")
    assert client.list_jobs() == []

    plain = client.get_runtime("custom-distributed")
    completed = client.train(plain, trainer=CustomTrainer(func=_fail_on_rank_1, func_args={"text": "x"}))
    failing = CustomTrainer(func=_fail_on_rank_1, func_args={"text": "started"}, num_nodes=2)
    failed = client.train(plain, trainer=failing, options=[Labels({"team": "vision"})])
    assert len(failed) == 12
    assert failed[0].isalpha()
    with pytest.raises(
        RuntimeError, match=rf"(?s)TrainJob {failed} is Failed: node-1.*rank 1.*KeyError: 'bad label'"
    ) as raised:
        client.wait_for_job_status(failed, timeout=60, polling_interval=1)
    assert "train_function.py" in str(raised.value)
    assert "node-1: status=FAILED, exit_code=1" in str(raised.value)
    statuses: list[str] = []
    job = client.wait_for_job_status(failed, {"Failed"}, callbacks=[lambda one: statuses.append(one.status)])
    assert (job.status, statuses, job.num_nodes, job.runtime) == ("Failed", ["Failed"], 2, plain)
    assert "started" in client.get_job_logs(failed, "node-1")  # node-0 may be stopped before it prints
    client.wait_for_job_status(completed, polling_interval=1)
    assert client.wait_for_job_status(completed, {"Running"}).status == "Complete"
    with pytest.raises(RuntimeError, match=f"TrainJob {completed} is Complete, so its status no longer changes"):
        client.wait_for_job_status(completed, {"Failed"})
    events = client.get_job_events(failed)
    assert (events[0].reason, events[0].involved_object_kind, events[0].involved_object_name) == (
        "Submitted",
        "TrainJob",
        failed,
    )
    assert ("Pod", f"{failed}-node-1", "TaskStarted") in {
        (one.involved_object_kind, one.involved_object_name, one.reason) for one in events
    }
    (workflow,) = distflow.list(labels={"team": "vision"})
    assert workflow.name == failed

    name = client.train(plain, trainer=CustomTrainer(func=_sleep), options=[Name("long")])
    with pytest.raises(RuntimeError, match="TrainJob long already exists"):
        client.train(plain, trainer=CustomTrainer(func=_sleep), options=[Name("long")])
    with pytest.raises(TimeoutError, match=r"TrainJob long is (Created|Running) after 1 s, not Complete"):
        client.wait_for_job_status(name, timeout=1, polling_interval=0.2)  # type: ignore[arg-type]  # Kubeflow says int
    assert next(client.get_job_logs(name, follow=True)) == "here"
    client.delete_job(name)
    installs = CustomTrainer(
        func=_sleep, packages_to_install=["no-such-package==1"], pip_index_urls=["https://127.0.0.1/simple"]
    )
    installed = client.train(plain, trainer=installs)
    with Client() as opened:
        (group,) = plan_of(opened, find_workflow(opened, installed)).groups
    assert group.venv is not None
    assert group.venv.lines == ("--index-url https://127.0.0.1/simple", "no-such-package==1")
    client.delete_job(installed)
    assert [one.name for one in client.list_jobs()] == [failed, completed]
    assert distflow.get("long").status == "FAILED_CANCELED"
    with pytest.raises(ValueError, match="there is no TrainJob long"):
        client.delete_job(name)
