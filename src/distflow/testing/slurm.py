"""A real Slurm cluster for tests: one controller and several nodes, all on this machine, without munge. It needs root.

It is ready in less than a second. ``stop`` ends all of its processes and jobs, and removes its files outside of its directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from distflow.testing.daemons import DAEMON_PATH, free_port, start_daemon
from distflow.testing.waiting import is_alive, wait_until

__all__ = ["Slurm", "missing_slurm"]

_COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_CONFIG = """\
ClusterName={name}
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=2
MinJobAge=86400
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} RealMemory={memory} {gres}State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm() -> str:
    """Return the reason why no cluster can be started here; empty if one can."""
    lacking = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name, path=DAEMON_PATH) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "root is required to start a Slurm cluster"


class Slurm:
    """A context manager for one cluster.

    Its nodes are ``n1``, ``n2`` and so on. The partition ``main`` has all nodes; ``add_partition`` adds a partition that may
    preempt its jobs. Commands find the cluster by the variables in ``environment``. If these cannot be set, as in a login over
    SSH, put the directory ``commands`` first in PATH: its ``sbatch``, ``squeue`` and other commands set the variables.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        cpus: int = 16,
        memory_mib: int = 8000,
        gpus: int = 8,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Write the configuration below ``folder``.

        Each node has ``gpus`` GPUs of type ``h100``, which are device files without a driver. ``options`` are settings that are
        added to ``slurm.conf`` or replaced in it.
        """
        self.folder = folder
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.config = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.config)}
        """Variables that the commands of Slurm need to find this cluster."""
        self.commands = folder / "bin"
        """A directory with the commands of Slurm, which set these variables themselves."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "log", "bin", "dev"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        # A short path, because the paths of the Unix sockets in it must be shorter than 108 bytes.
        self._spool = Path(tempfile.mkdtemp(prefix="slurm-"))
        port = self._port = free_port("", nodes + 1)
        lines = _CONFIG.format(
            name="ci",
            # Unique job ids: distflow finds its resident program on a node (`runtime.services.resident`) by the job id, and
            # several clusters may run on this machine.
            first=port * 1000,
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            spool=self._spool,
            port=port,
            nodes=f"n[1-{nodes}]",
            ports=f"[{port + 1}-{port + nodes}]",
            cpus=cpus,
            memory=memory_mib,
            gres=f"Gres=gpu:h100:{gpus} " if gpus else "",
        )
        for key, value in (options or {}).items():
            lines, found = re.subn(rf"(?m)^{re.escape(key)}=.*$", f"{key}={value}", lines)
            lines += "" if found else f"{key}={value}\n"
        self.config.write_text(lines)
        (folder / "gres.conf").write_text("AutoDetect=off\n" + (self._gpu_line(gpus) if gpus else ""))
        for name in _COMMANDS:
            if (program := shutil.which(name, path=DAEMON_PATH)) is not None:
                (self.commands / name).write_text(f"#!/bin/sh\nexport SLURM_CONF='{self.config}'\nexec {program} \"$@\"\n")
                (self.commands / name).chmod(0o755)

    def __enter__(self) -> Slurm:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self.stop()

    def start(self) -> None:
        """Start the controller and all nodes, and wait until all nodes are idle."""
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_for_nodes(*self.nodes)

    def stop(self) -> None:
        """Kill all of its processes, including its jobs. May be called twice."""
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait(60)
        self._daemons.clear()
        wait_until(lambda: not self._kill(self.processes()), 20.0, f"all processes of {self.folder} have ended")
        shutil.rmtree(self._spool, ignore_errors=True)

    def run(self, *command: str, stdin: str = "") -> str:
        """Run a command of Slurm as a user would, and return its output. Raises ``CalledProcessError``."""
        program = [str(self.commands / command[0]), *command[1:]]
        done = subprocess.run(program, input=stdin, capture_output=True, check=True, timeout=60, text=True, cwd=self.folder)
        return done.stdout

    def jobs(self) -> list[str]:
        """Return the ids of all jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i", "--states=PD,R,CF,CG,S").split()

    def cancel_jobs(self) -> None:
        """Cancel all jobs and wait until none waits or runs, so that the next test begins with an idle cluster."""
        if found := self.jobs():
            self.run("scancel", *found)
            # Kill the processes, because a job that is canceled while it starts may be COMPLETING for a minute.
            wait_until(lambda: not self._kill(self.processes()) and not self.jobs(), 60.0, "all jobs of the cluster have ended")

    def add_partition(self, name: str, **options: str) -> None:
        """Add a partition with all nodes, unless it exists. With ``PriorityTier="10"``, its jobs cancel those of ``main``."""
        if f"\nPartitionName={name} " in self.config.read_text():
            return
        partition = [f"PartitionName={name}", "Nodes=ALL", "State=UP", *(f"{key}={value}" for key, value in options.items())]
        with self.config.open("a") as config:  # for the next start of the controller
            config.write(" ".join(partition) + "\n")
        self.run("scontrol", "create", *partition)

    def start_controller(self) -> None:
        """Start ``slurmctld``, which continues from its saved state, and wait until it listens."""
        self._start("slurmctld", "slurmctld")
        # Probe the port instead of running a command, which would retry only after a second.
        wait_until(self._listens, 20.0, f"slurmctld listens; its log: {self.folder}/log")

    def stop_controller(self) -> None:
        """Stop ``slurmctld``. Jobs continue, and commands fail after their timeout."""
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        """Start the ``slurmd`` of a node, without waiting for the node."""
        self._start(node, "slurmd", "-N", node)

    def kill_node(self, node: str, *, with_jobs: bool = True) -> None:
        """Kill a node as a power failure does: ``slurmd``, and by default the processes of its jobs.

        After 10 s (``SlurmdTimeout``), the controller sets the node to DOWN and ends its jobs as ``NODE_FAIL``.
        """
        self._end(node, signal.SIGKILL)
        if with_jobs:
            wait_until(lambda: not self._kill(self.processes(node)), 20.0, f"all processes of {node} have ended")

    def wait_for_nodes(self, *nodes: str) -> None:
        """Wait until these nodes are up and have no job."""
        wait_until(
            lambda: all((self._states() or {}).get(node) == "idle" for node in nodes), 30.0,
            f"{', '.join(nodes)} idle; logs: {self.folder}/log",
        )  # fmt: skip

    def processes(self, node: str = "") -> list[int]:
        """Return the process ids of jobs and step daemons on ``node``.

        Without ``node``: on all nodes, and also those of Slurm commands such as ``srun``.
        """
        spools = [str(self._spool / name) for name in ([node] if node else self.nodes)]
        marks = [f"SLURM_CONF={self.config}"] + ([f"SLURMD_NODENAME={node}"] if node else [])
        daemons = {daemon.pid for daemon in self._daemons.values()}
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in daemons and is_alive(int(name)):
                with contextlib.suppress(OSError):
                    variables = Path("/proc", name, "environ").read_bytes().decode("utf-8", "replace").split("\0")
                    if all(mark in variables for mark in marks) or os.readlink(f"/proc/{name}/cwd") in spools:
                        found.append(int(name))
        return found

    def _gpu_line(self, gpus: int) -> str:
        """Create the device files, and return their line of ``gres.conf``."""
        for number in range(gpus):
            path = self.folder / "dev" / f"nvidia{number}"
            if not path.exists():
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(195, number))
        return f"Name=gpu Type=h100 File={self.folder}/dev/nvidia[0-{gpus - 1}]\n"

    def _states(self) -> dict[str, str] | None:
        """Return the state of each node; ``None`` while the controller does not answer."""
        self._check()
        command = [str(self.commands / "sinfo"), "--noheader", "--Node", "--format=%N %t"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else None

    def _listens(self) -> bool:
        self._check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def _check(self) -> None:
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                log = self.folder / "log" / f"{name}.out"
                raise RuntimeError(f"{name} exited with {daemon.returncode}; the end of {log}:\n{log.read_text()[-2000:]}")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        found = shutil.which(program, path=DAEMON_PATH)
        if found is None:
            raise FileNotFoundError(missing_slurm())
        # The step daemons of a node inherit this working directory. `processes` finds them by it.
        directory = self._spool / name if name in self.nodes else self.folder
        directory.mkdir(exist_ok=True)
        self._daemons[name] = start_daemon(
            [found, "-D", *arguments, "-f", str(self.config)], self.folder / "log" / f"{name}.out", cwd=directory
        )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(60)

    @staticmethod
    def _kill(pids: list[int]) -> list[int]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids
