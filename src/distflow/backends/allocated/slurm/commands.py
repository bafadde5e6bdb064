"""Slurm's commands on the login node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.transports.base import Completed, Transport

__all__ = ["CommandMissing", "SlurmCommands", "last_words"]

_TIMEOUT_S = 60.0
_SETTINGS = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables that say which cluster is meant."""
_PRELUDE = r"""
jobs='(SLURM|SQUEUE|SCONTROL|SACCT|SINFO|SCANCEL)_[A-Za-z0-9_]*|SBATCH_(ARRAY_INX|EXPORT|WAIT|TEST_ONLY)'
for name in $(env | sed -nE "s/^($jobs)=.*/\1/p"); do
  case $name in SLURM_CONF|SLURM_CLUSTERS|SLURM_TIME_FORMAT) ;; *) unset "$name" ;; esac
done
command -v squeue >/dev/null 2>&1 || [ ! -r /etc/profile ] || . /etc/profile >/dev/null 2>&1
exec "$@"
"""
"""Variables of a job in which distflow itself may run, and the user's formats of output, must not change what commands do.

A command over SSH does not start a login shell, which is where many clusters add Slurm to PATH.
"""


class CommandMissing(NodeUnreachable):
    """The login node does not have a command of Slurm."""


class SlurmCommands:
    """Runs commands on the login node."""

    def __init__(self, login: Transport, *, is_local: bool) -> None:
        """Use ``login``. With ``is_local``, variables of this process choose the cluster."""
        self._login = login
        chosen = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ] if is_local else []
        self._settings = chosen

    @property
    def node(self) -> str:
        """The login node's name."""
        return self._login.name

    def run(self, *command: str, input: bytes = b"", settings: Sequence[str] = (), timeout_s: float = _TIMEOUT_S) -> Completed:
        """Run a command to its end. Raises ``NodeUnreachable`` also if the command is not installed."""
        variables = [*self._settings, *settings]
        argv = [*(["env", *variables] if variables else []), "sh", "-c", _PRELUDE, "slurm", *command]
        done = self._login.run(argv, input=input, timeout_s=timeout_s)
        if done.exit_code == 127:
            raise CommandMissing(
                self.node,
                f"`{command[0]}` was not found",
                hint="set `login` of the pool to a machine with the commands of Slurm, and make them available in /etc/profile",
            )
        return done

    def asked(self, *command: str) -> str:
        """Return the output of a command that asks Slurm, with times in seconds. Raises ``NodeUnreachable`` if it fails."""
        done = self.run(*command, settings=("SLURM_TIME_FORMAT=%s",))
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
