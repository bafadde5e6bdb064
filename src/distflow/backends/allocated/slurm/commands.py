"""Slurm's commands on the login node."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.transports.base import Channel, Completed, Stream, Transport

__all__ = ["CommandMissing", "SlurmCommands", "SlurmLogin", "last_words", "step_may_pass", "step_words"]

_TIMEOUT_S = 60.0
_SETTINGS = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables that say which cluster is meant."""
_TIMES = "SLURM_TIME_FORMAT=%s"
_PRELUDE = r"""
distflow_jobs='(SLURM|SQUEUE|SCONTROL|SACCT|SINFO|SCANCEL)_[A-Za-z0-9_]*|SBATCH_(ARRAY_INX|EXPORT|WAIT|TEST_ONLY)'
for distflow_name in $(env | sed -nE "s/^($distflow_jobs)=.*/\1/p"); do
  case $distflow_name in SLURM_CONF|SLURM_CLUSTERS) ;; *) unset "$distflow_name" ;; esac
done
command -v squeue >/dev/null 2>&1 || [ ! -r /etc/profile ] || . /etc/profile >/dev/null 2>&1
exec "$@"
"""
"""Variables of a job in which distflow itself may run, and the user's formats of output, must not change what commands do.

A command over SSH does not start a login shell, which is where many clusters add Slurm to PATH.
"""


class CommandMissing(NodeUnreachable):
    """The login node does not have a command of Slurm."""


class SlurmLogin:
    """The login node as a transport whose commands find Slurm and its cluster (contract: ``transports.base.Transport``)."""

    def __init__(self, login: Transport, *, is_local: bool) -> None:
        """Use ``login``. With ``is_local``, variables of this process choose the cluster."""
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

    def run(self, *command: str, input: bytes = b"", timeout_s: float = _TIMEOUT_S) -> Completed:
        """Run a command to its end. Raises ``NodeUnreachable`` also if the command is not installed."""
        done = self._login.run(command, input=input, timeout_s=timeout_s)
        if done.exit_code == 127:
            program = next(word for word in command if word != "env" and "=" not in word)
            raise CommandMissing(
                self.node,
                f"`{program}` was not found",
                hint="set `login` of the pool to a machine with the commands of Slurm, and add their directory to PATH there",
            )
        return done

    def asked(self, *command: str) -> str:
        """Return the output of a command that asks Slurm, with times in seconds. Raises ``NodeUnreachable`` if it fails."""
        done = self.run("env", _TIMES, *command)
        if done.exit_code != 0:
            raise self.failed(command[0], done)
        return done.stdout.decode("utf-8", "replace")

    def failed(self, program: str, done: Completed) -> NodeUnreachable:
        """Return the error for a command that failed, which may succeed later."""
        return NodeUnreachable(self.node, f"`{program}` failed: {last_words(done) or f'exit code {done.exit_code}'}")


def last_words(done: Completed) -> str:
    """Return the messages of a command on one line, without the names of programs in front."""
    text = (done.stderr or done.stdout)[-4000:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found: list[str] = []
    for line in lines:
        words = line
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
            words = words.removeprefix(prefix)
        if words not in found and not words.startswith('Try "'):
            found.append(words)
    return plain("; ".join(found))[-1000:]


_NO_STEP = re.compile(r"(?i)unable to (?:create step|confirm allocation)|socket timed out|temporarily unavailable|zero bytes")
_NO_JOB = re.compile(r"(?i)invalid job|already completing|expired")


def step_may_pass(printed: str) -> bool:
    """Return whether ``srun`` may create a step a moment later, after it printed this: its job has not ended."""
    return _NO_STEP.search(printed) is not None and _NO_JOB.search(printed) is None


def step_words(job: str, host: str, het_group: int | None = None) -> list[str]:
    """Return the words before a command that run it as a further step of a job, on one of its hosts.

    ``het_group``: the component of a heterogeneous job that has the host.
    """
    return [
        "srun", f"--jobid={job}", *([] if het_group is None else [f"--het-group={het_group}"]),
        "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--gres=none", "--mpi=none", "--chdir=/",
        # Without it, Slurm keeps back incomplete lines.
        "--unbuffered", "--quiet",
    ]  # fmt: skip
