"""Slurm's commands on the login node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distflow.backends.allocated.slurm.commands import SlurmCommands, SlurmLogin, error_text
from distflow.transports.base import Completed
from distflow.transports.local import LocalTransport


class JobTransport(LocalTransport):
    """A transport whose commands run with the variables of a Slurm job and the user's settings of Slurm's commands."""

    variables = (
        "SLURM_JOB_ID=5", "SLURM_NTASKS=3", "SQUEUE_FORMAT=%u", "SQUEUE_STATES=PD", "SBATCH_WAIT=1", "SBATCH_ACCOUNT=lab",
        "OTHER=a\nSLURM_FAKE=1 2",
    )  # fmt: skip

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        return super().run(["env", *self.variables, *argv], input=input, timeout_s=timeout_s)


def test_variables_of_a_job_and_of_the_user_do_not_change_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/my slurm.conf")
    commands = SlurmCommands(SlurmLogin(JobTransport("login"), is_local=True))
    lines = commands.run("env").stdout.decode().splitlines()
    found = [line for line in lines if line.startswith(("SLURM", "SQUEUE", "SBATCH"))]
    assert sorted(found) == ["SBATCH_ACCOUNT=lab", "SLURM_CONF=/etc/my slurm.conf", "SLURM_FAKE=1 2"]
    remote = SlurmCommands(SlurmLogin(LocalTransport("login"), is_local=False))
    assert b"SLURM_CONF" not in remote.run("env").stdout


def test_arguments_arrive_unchanged() -> None:
    commands = SlurmCommands(SlurmLogin(LocalTransport("login"), is_local=False))
    words = ("a b", "$(c)", "'", "", "d\ne", "--x=*")
    assert commands.run("printf", "%s|", *words).stdout.decode() == "".join(f"{word}|" for word in words)


def test_the_error_text_is_one_line_without_the_names_of_programs() -> None:
    text = (
        b'sbatch: error: invalid partition: nope\nsbatch: \x1b[31mfailed\nTry "sbatch --help"\nsbatch: error: \x1b[31mfailed\n'
    )
    assert error_text(Completed(exit_code=1, stdout=b"", stderr=text)) == "invalid partition: nope; failed"
