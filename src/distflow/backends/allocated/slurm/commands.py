"""Run Slurm's commands on the login node."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.transports.base import Channel, Completed, Stream, Transport

__all__ = ["CommandMissing", "SlurmCommands", "SlurmLogin", "error_text", "is_transient_error", "step_prefix"]

_TIMEOUT_S = 60.0
_SETTINGS = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables that choose the cluster."""
_TIMES = "SLURM_TIME_FORMAT=%s"
_PRELUDE = r"""
distflow_jobs='(SLURM|SQUEUE|SCONTROL|SACCT|SINFO|SCANCEL)_[A-Za-z0-9_]*|SBATCH_(ARRAY_INX|EXPORT|WAIT|TEST_ONLY)'
for distflow_name in $(env | sed -nE "s/^($distflow_jobs)=.*/\1/p"); do
  case $distflow_name in SLURM_CONF|SLURM_CLUSTERS) ;; *) unset "$distflow_name" ;; esac
done
command -v squeue >/dev/null 2>&1 || [ ! -r /etc/profile ] || . /etc/profile >/dev/null 2>&1
exec "$@"
"""
"""Runs a command of Slurm in a clean environment.

distflow itself may run in a job, and users may set output formats. The variables of that job and of these formats must not
affect the command. The script reads ``/etc/profile`` if ``squeue`` is not in PATH, because a command over SSH does not start a
login shell, and many clusters add Slurm to PATH there.
"""


class CommandMissing(NodeUnreachable):
    """The login node does not have a command of Slurm."""


class SlurmLogin:
    """The login node as a transport whose commands find Slurm and its cluster (contract: ``transports.base.Transport``)."""

    def __init__(self, login: Transport, *, is_local: bool) -> None:
        """Use ``login``. With ``is_local``, environment variables of this process choose the cluster."""
        self._login = login
        chosen = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ] if is_local else []
        self._prefix = [*(["env", *chosen] if chosen else []), "sh", "-c", _PRELUDE, "slurm"]

    @property
    def name(self) -> str:
        """The login node's name."""
        return self._login.name

    @property
    def reached_address(self) -> str | None:
        """The network address at which the login node was reached."""
        return self._login.reached_address

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """The addresses of the login node's name."""
        return self._login.named_addresses

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end."""
        return self._login.run([*self._prefix, *argv], input=input, timeout_s=timeout_s)

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command and keep a channel to it."""
        return self._login.open([*self._prefix, *argv])

    def dial(self, port: int, *, timeout_s: float) -> Stream:
        """Connect to a TCP port of the login node."""
        return self._login.dial(port, timeout_s=timeout_s)

    def hang_up(self) -> None:
        """Drop the connection."""
        self._login.hang_up()

    def close(self) -> None:
        """Close the connection for good."""
        self._login.close()


class SlurmCommands:
    """Runs commands of Slurm."""

    def __init__(self, login: SlurmLogin) -> None:
        """Use ``login``."""
        self._login = login

    @property
    def node(self) -> str:
        """The login node's name."""
        return self._login.name

    def run(self, *command: str, program: str = "", input: bytes = b"", timeout_s: float = _TIMEOUT_S) -> Completed:
        """Run a command to its end. Raises ``NodeUnreachable``, and ``CommandMissing`` if ``program`` is not installed.

        ``program`` is by default the first word of the command.
        """
        done = self._login.run(command, input=input, timeout_s=timeout_s)
        if done.exit_code == 127:
            raise CommandMissing(
                self.node,
                f"`{program or command[0]}` was not found",
                hint="set `login` of the pool to a machine with the commands of Slurm, and add their directory to its PATH",
            )
        return done

    def query(self, *command: str) -> str:
        """Return the output of a command, with times in seconds since the epoch. Raises ``NodeUnreachable`` if it fails."""
        done = self.run("env", _TIMES, *command, program=command[0])
        if done.exit_code != 0:
            raise self.failure(command[0], done)
        return done.stdout.decode("utf-8", "replace")

    def failure(self, program: str, done: Completed) -> NodeUnreachable:
        """Return the error for a failed command that may succeed later."""
        return NodeUnreachable(self.node, f"`{program}` failed: {error_text(done) or f'exit code {done.exit_code}'}")


def error_text(done: Completed) -> str:
    """Return the error messages of a command on one line, without the leading names of programs."""
    text = (done.stderr or done.stdout)[-4000:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found: list[str] = []
    for line in lines:
        message = line
        for prefix in (
            "sbatch: ",
            "squeue: ",
            "scancel: ",
            "scontrol: ",
            "sinfo: ",
            "srun: ",
            "error: ",
            "fatal: ",
            "allocation failure: ",
        ):
            message = message.removeprefix(prefix)
        if message not in found and not message.startswith('Try "'):
            found.append(message)
    return plain("; ".join(found))[-1000:]


_NO_STEP = re.compile(r"(?i)unable to (?:create step|confirm allocation)|socket timed out|temporarily unavailable|zero bytes")
_NO_JOB = re.compile(r"(?i)invalid job|already completing|expired")


def is_transient_error(printed: str) -> bool:
    """Return whether ``srun``, which printed this error, may create the step a moment later: the job has not ended."""
    return _NO_STEP.search(printed) is not None and _NO_JOB.search(printed) is None


def step_prefix(job: str, host: str, het_group: int | None = None) -> list[str]:
    """Return the arguments before a command that run it as another step of a job, on one of its hosts.

    ``het_group`` is the component of a heterogeneous job that has the host.
    """
    return [
        "srun", f"--jobid={job}", *([] if het_group is None else [f"--het-group={het_group}"]),
        "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--gres=none", "--mpi=none", "--chdir=/",
        # Otherwise, Slurm holds back incomplete lines.
        "--unbuffered", "--quiet",
    ]  # fmt: skip
