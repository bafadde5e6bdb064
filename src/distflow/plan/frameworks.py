"""The commands with which each framework and launcher starts its processes, so that the processes find each other.

``framework`` and ``launcher`` of a spec select a function. It gets a task of a world and returns its command, variables and
files, with placeholders for values that are not known yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct, field

from distflow.layout.checks.launchers import PythonCommand, python_command
from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.plan.model import ATTEMPT_DIR, TORCHRUN, PlannedFile, address_of
from distflow.spec.model import LauncherOptions, ResourceSpec

__all__ = ["FRAMEWORKS", "LAUNCHERS", "StartCommand", "StartMethod", "WorldTask", "start_command"]

_ADDRESS, _PORT = "@@MASTER_ADDR@@", "@@MASTER_PORT@@"


class WorldTask(Struct, frozen=True, kw_only=True):
    """One task of a world, and the command that the spec gives it."""

    group: str
    world: WorldLayout
    ranks: TaskRanks
    argv: tuple[str, ...]
    resource: ResourceSpec = ResourceSpec()
    launcher: LauncherOptions = LauncherOptions()
    given: Mapping[str, str] = field(default_factory=dict)
    """The variables that the spec gives the task."""

    @property
    def is_master(self) -> bool:
        """Whether it holds rank 0."""
        return self.ranks.node_rank == 0

    @property
    def nodes(self) -> str:
        """The number of tasks in the world."""
        return str(len(self.world.tasks))

    @property
    def node_rank(self) -> str:
        """The task's number in the world."""
        return str(self.ranks.node_rank)

    @property
    def address(self) -> str:
        """The address of its own node."""
        return address_of(self.ranks.task)

    @property
    def hosts(self) -> str:
        """The nodes of the world with their numbers of ranks, in the format of ``mpirun`` and ``horovodrun``."""
        return ",".join(f"{address_of(item.task)}:{item.size}" for item in self.world.tasks)

    @property
    def python(self) -> PythonCommand:
        """The parts of the command, for launchers that need Python. ``layout.checks.launchers`` has refused other commands."""
        found = python_command(self.argv)
        if isinstance(found, PythonCommand):
            return found
        raise AssertionError(found)

    @property
    def target(self) -> tuple[str, ...]:
        """The script or module with its arguments, without the interpreter."""
        return (*(("-m",) if self.python.is_module else ()), self.python.target, *self.python.arguments)


class StartCommand(Struct, frozen=True, kw_only=True):
    """The command that a task finally runs."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the variables that every task of a world gets. Variables of the spec override them."""
    files: tuple[PlannedFile, ...] = ()


class StartMethod(Struct, frozen=True, kw_only=True):
    """An entry of ``FRAMEWORKS`` or ``LAUNCHERS``."""

    start: Callable[[WorldTask], StartCommand]
    ends_with_lead: bool = False
    """Whether only the lead's command ends by itself. The other tasks serve it, and are stopped when it has completed."""


def _as_command(task: WorldTask) -> StartCommand:
    """Return the command unchanged, because it starts its ranks itself."""
    return StartCommand(argv=task.argv)


def _torchrun(task: WorldTask) -> StartCommand:
    """Return the command under torchrun.

    Its static rendezvous keeps the ranks of the spec, but cannot restart ranks: its store keeps the entries from before
    the restart, and the ranks hang or fail again (pytorch/pytorch#135712). With ``max_restarts`` torchrun therefore uses the
    dynamic rendezvous, with a new store for each restart. The dynamic rendezvous numbers the nodes itself.

    Options: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    python, restarts = task.python, task.launcher.max_restarts
    words = [python.interpreter, *TORCHRUN, "--nnodes", task.nodes, "--node-rank", task.node_rank]
    words += ["--nproc-per-node", str(task.ranks.size)]
    environment = {}
    if restarts:
        # The workers meet at the address that the first node announces, by default its host name.
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_ADDRESS}:{_PORT}", "--local-addr", task.address]
        words += ["--rdzv-id", f"@@WORKFLOW_ID@@-{task.group}-@@RETRY_ID@@", "--rdzv-conf", f"is_host={int(task.is_master)}"]
        words += ["--max-restarts", str(restarts)]
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        words += ["--master-addr", _ADDRESS, "--master-port", _PORT]
    return StartCommand(argv=(*words, *task.target), environment=environment)


def _spawn(task: WorldTask) -> StartCommand:
    """Return the command under distflow's own launcher, ``distflow.train.launch``."""
    words = [task.python.interpreter, "-m", "distflow.train.launch", "--offset", str(task.ranks.offset)]
    words += ["--size", str(task.ranks.size), "--world_size", str(task.world.world_size)]
    if task.launcher.max_restarts:
        words += ["--max-restarts", str(task.launcher.max_restarts)]
    words += ["--numa"] if task.launcher.numa else []
    return StartCommand(argv=(*words, *task.target))


def _deepspeed(task: WorldTask) -> StartCommand:
    """Return the command under DeepSpeed's launcher, which runs on every node without SSH, with a hostfile of all nodes.

    The launcher numbers the GPUs of a node from 0 and sets CUDA_VISIBLE_DEVICES itself, so a task should request all GPUs of
    its node. A script that calls ``deepspeed.init_distributed`` also runs under torchrun, which does not have this limit.

    Options and format: ``deepspeed/launcher/runner.py`` of DeepSpeed 0.19.8.
    """
    python = task.python
    hosts = "".join(f"{address_of(item.task)} slots={item.size}\n" for item in task.world.tasks)
    hostfile = PlannedFile(path="config/hostfile", shown="hostfile", text=hosts, size=len(hosts.encode()))
    words = ["deepspeed", "--hostfile", f"{ATTEMPT_DIR}/{hostfile.path}", "--no_ssh", "--node_rank", task.node_rank]
    words += ["--master_addr", _ADDRESS, "--master_port", _PORT]
    words += ["--module"] if python.is_module else []
    return StartCommand(argv=(*words, python.target, *python.arguments), files=(hostfile,))


def _accelerate(task: WorldTask) -> StartCommand:
    """Return the command under ``accelerate launch``. A task that requests 0 GPUs trains on the CPU.

    With several ranks on a node, accelerate runs torchrun (``--multi_gpu``, also on nodes without GPUs). With one rank, it
    starts the script itself, which finds its rank in the variables that every task of one rank has. ``--same_network`` selects
    torchrun's static rendezvous, which keeps the ranks. ``accelerate`` divides the ranks evenly among the nodes.

    Options: ``accelerate/commands/launch.py`` of Accelerate 1.15.
    """
    python, on_cpu = task.python, task.resource.gpu == 0
    words = ["accelerate", "launch", "--num_machines", task.nodes, "--num_processes", str(task.world.world_size)]
    words += ["--machine_rank", task.node_rank, "--main_process_ip", _ADDRESS, "--main_process_port", _PORT]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {}
    if task.ranks.size > 1:
        words += ["--multi_gpu", "--same_network"]
        environment = {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    elif on_cpu:
        words += ["--cpu"]
    words += ["--module"] if python.is_module else []
    return StartCommand(argv=(*words, python.target, *python.arguments), environment=environment)


_HOLD = ("sh", "-c", "echo 'this node is reserved: the lead task starts the processes on it'; exec sleep 2147483647")


def _mpi(task: WorldTask) -> StartCommand:
    """Return the command under Open MPI's ``mpirun``, which passes on the spec's variables, MASTER_ADDR and MASTER_PORT.

    The lead starts the processes on the other nodes through its own SSH connections. The other tasks only reserve their nodes.
    The lead's node must be able to log in to the other nodes without a password, and the program must have the same path on all
    nodes.

    Options: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html
    """
    if not task.is_master:
        return StartCommand(argv=_HOLD)
    exported = ("MASTER_ADDR", "MASTER_PORT", *sorted({*task.given} - {"MASTER_ADDR", "MASTER_PORT"}))
    words = ["mpirun", "-np", str(task.world.world_size), "--host", task.hosts]
    words += [word for name in exported for word in ("-x", name)]
    return StartCommand(argv=(*words, *task.argv))


def _horovod(task: WorldTask) -> StartCommand:
    """Return the command under ``horovodrun``, with Gloo as the controller instead of MPI. Nodes must be set up as for MPI.

    Options: https://horovod.readthedocs.io/en/stable/running_include.html
    """
    if not task.is_master:
        return StartCommand(argv=_HOLD)
    words = ["horovodrun", "--gloo", "-np", str(task.world.world_size), "-H", task.hosts]
    return StartCommand(argv=(*words, *task.argv))


def _tensorflow(task: WorldTask) -> StartCommand:
    """Return the command unchanged, with the cluster in ``TF_CONFIG``: one worker for each task, which uses all visible GPUs.

    All workers listen on the same port number, each on its own node. The port is known to be free only on the master's node.

    Format: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
    """
    workers = [f"{address_of(item.task)}:{_PORT}" for item in task.world.tasks]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": task.ranks.node_rank}}
    return StartCommand(argv=task.argv, environment={"TF_CONFIG": json.dumps(config)})


def _jax(task: WorldTask) -> StartCommand:
    """Return the command unchanged, with JAX's coordinator in its environment: one process for each task, with all its GPUs.

    ``jax.distributed.initialize()`` reads only the address by itself. The script must pass the other two values::

        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])
        )

    Source: ``jax/_src/distributed.py`` of JAX 0.10.2.
    """
    environment = {
        "JAX_COORDINATOR_ADDRESS": f"{_ADDRESS}:{_PORT}",
        "JAX_NUM_PROCESSES": task.nodes,
        "JAX_PROCESS_ID": task.node_rank,
        # Without this variable, processes on CPUs find each other but cannot compute together.
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    return StartCommand(argv=task.argv, environment=environment)


def _ray(task: WorldTask) -> StartCommand:
    """Return the command that starts Ray's head (the lead) or a worker. The head runs the lead's own command in the cluster.

    ``distflow.ray_cluster`` runs on the nodes and waits until all workers have joined before the command begins.

    Options: https://docs.ray.io/en/latest/cluster/cli.html
    """
    words = ["python3", "-m", "distflow.ray_cluster", "head" if task.is_master else "worker"]
    words += ["--address", f"{_ADDRESS}:{_PORT}", "--node-address", task.address]
    if task.resource.gpu is not None:
        words += ["--gpus", str(task.resource.gpu)]
    if task.resource.cpu is not None:
        words += ["--cpus", str(task.resource.cpu)]
    if task.is_master:
        words += ["--nodes", task.nodes, "--", *task.argv]
    return StartCommand(argv=tuple(words), environment={"RAY_ADDRESS": f"{_ADDRESS}:{_PORT}"})


LAUNCHERS: Mapping[str, StartMethod] = MappingProxyType(
    {"torchrun": StartMethod(start=_torchrun), "spawn": StartMethod(start=_spawn), "command": StartMethod(start=_as_command)}
)
FRAMEWORKS: Mapping[str, StartMethod] = MappingProxyType(
    {
        "pytorch": StartMethod(start=_as_command),  # `launcher` starts its ranks
        "deepspeed": StartMethod(start=_deepspeed),
        "accelerate": StartMethod(start=_accelerate),
        "horovod": StartMethod(start=_horovod, ends_with_lead=True),
        "mpi": StartMethod(start=_mpi, ends_with_lead=True),
        "tensorflow": StartMethod(start=_tensorflow),
        "jax": StartMethod(start=_jax),
        "ray": StartMethod(start=_ray, ends_with_lead=True),
        "custom": StartMethod(start=_as_command),
    }
)


def start_command(framework: str | None, task: WorldTask) -> StartCommand:
    """Return the command that a task runs: under its launcher if it has one, else as its framework requires.

    Without either, the command is unchanged.
    """
    if task.launcher.starts_ranks or framework is None:
        return LAUNCHERS[task.launcher.kind].start(task)
    return FRAMEWORKS[framework].start(task)
