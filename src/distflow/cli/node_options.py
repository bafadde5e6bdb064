"""Options that several commands have, such as the Python interpreter, the environment, and the number of processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from distflow.errors import InputError
from distflow.pools.model import NodeSettings, is_program

__all__ = ["EnvOption", "FromSbatchOption", "PythonOption", "RanksOption", "SetupOption", "VenvOption", "parse_node_settings"]

PythonOption = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="The Python interpreter on the nodes, such as /opt/venv/bin/python."),
]
SetupOption = Annotated[
    str | None,
    typer.Option("--setup", metavar="COMMANDS", help="Shell commands to run before each task, such as 'module load cuda'."),
]
VenvOption = Annotated[
    str | None,
    typer.Option(
        "--venv", metavar="FILE", help="A requirements file. Each node builds a Python environment with its packages once."
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node",
        "--nproc_per_node",
        min=1,
        help="Processes on each node. Default: as in the torchrun command or sbatch script, or one for each GPU, or 1.",
    ),
]
FromSbatchOption = Annotated[
    Path | None, typer.Option("--from-sbatch", metavar="FILE", help="Translate a script for Slurm's sbatch.")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Set an environment variable in every task; may be repeated."),
]


def parse_node_settings(
    python: str | None, setup: str | None, env: Sequence[str] | None, venv: str | None = None
) -> NodeSettings:
    """Parse the values of ``--python``, ``--setup``, ``--env`` and ``--venv``.

    Raises ``InputError``, or ``ProblemsFound`` for the requirements file ``venv``.
    """
    if python is not None and not is_program(python):
        raise InputError(
            f"--python `{python}` is not the path or the name of a program", hint="write `--python /opt/venv/bin/python`"
        )
    variables: dict[str, str] = {}
    for item in env or ():
        name, equals, value = item.partition("=")
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            hint = "write NAME=VALUE; the name has letters, digits and `_`, and does not begin with a digit"
            raise InputError(f"--env: `{name}` is not a valid name of a variable", hint=hint)
        if not equals:
            raise InputError(f"--env `{name}` is not of the form NAME=VALUE", hint=f"write {name}=value")
        variables[name] = value
    requirements = None
    if venv is not None:
        from distflow.documents.requirements_file import read_requirements

        requirements = read_requirements(venv)
    return NodeSettings(python=python, setup=setup, environment=variables, venv=requirements)
