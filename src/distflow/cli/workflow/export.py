"""``distflow workflow export``."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_pool
from distflow.cli.context import open_submit_client
from distflow.cli.node_options import EnvOption, PythonOption, SetupOption, parse_node_settings
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.workflow.submission import parse_overrides, read_stdin, warn
from distflow.cli.workflow.submit import SetOption, SetStringOption
from distflow.client.export import Exported, Kind, export_to_kubernetes, export_to_osmo, export_to_slurm
from distflow.client.submission import SubmitRequest
from distflow.documents.text import plain_lines
from distflow.errors import InputError

__all__ = ["app"]

app = command_app()


class _Target(str, Enum):
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    TRAINJOB = "trainjob"
    OSMO = "osmo"


@app.command(
    "export",
    epilog="Examples: distflow workflow export train.yaml --to slurm > train.sbatch"
    "  ·  distflow workflow export train.yaml --to slurm --pool cluster --output train.sbatch"
    "  ·  distflow workflow export train.yaml --to kubernetes --pool pods > jobset.yaml"
    "  ·  distflow workflow export train.yaml --to trainjob --pool pods > trainjob.yaml"
    "  ·  distflow workflow export train.yaml --to osmo > osmo.yaml",
)
def export_workflow(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE|ID", help="A spec (a YAML file), - for standard input, or the id of a workflow."),
    ],
    to: Annotated[_Target, typer.Option("--to", help="The system to write for.")],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write to this file instead of standard output.")
    ] = None,
    sets: SetOption = None,
    set_string: SetStringOption = None,
    set_env: Annotated[
        list[str] | None,
        typer.Option(
            "--set-env",
            metavar="NAME[=VALUE]",
            help="For Slurm: the script expects this secret environment variable in every task. Its value is not written "
            "to the script.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            "-p",
            help="A pool with `backend: slurm` or `kubernetes`, for partition, account, image …",
            autocompletion=complete_pool,
        ),
    ] = None,
    python: PythonOption = None,
    setup: SetupOption = None,
    env: EnvOption = None,
    indexed_job: Annotated[
        bool, typer.Option("--indexed-job", help="For Kubernetes: write plain Indexed Jobs instead of JobSets.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Write a spec as a script for Slurm, as manifests of Kubernetes or Kubeflow Trainer, or as a spec for OSMO.

    The script or the manifests need no distflow on the cluster. Each part of the spec that the script or the spec for OSMO
    leaves out causes a warning, which is also a comment in the output. Parts that manifests cannot express are errors. Secrets
    are never written.
    """
    if to is _Target.OSMO and (unused := _unused_option(pool, python, setup, env)):
        raise InputError(f"{unused} has no effect on a spec for OSMO", hint=f"omit {unused}")
    if indexed_job and to is not _Target.KUBERNETES:
        raise InputError("`--indexed-job` can only be used with `--to kubernetes`", hint="omit --indexed-job")
    overrides = parse_overrides(sets or [], set_string or [], set_env or [])
    settings = parse_node_settings(python, setup, env)
    with open_submit_client() as client:
        request = SubmitRequest(spec=file, text=read_stdin(file), overrides=overrides, pool=pool, settings=settings)
        if to in (_Target.KUBERNETES, _Target.TRAINJOB):
            kind: Kind = "trainjob" if to is _Target.TRAINJOB else "job" if indexed_job else "jobset"
            exported = export_to_kubernetes(client, request, kind=kind, file=output, force=force)
        else:
            export = export_to_osmo if to is _Target.OSMO else export_to_slurm
            exported = export(client, request, file=output, force=force)
    if format_type is Format.JSON:
        print(json.dumps(_as_json(to, exported), indent=2))
        return
    warn(exported.warnings)
    if output is None:
        sys.stdout.write(exported.text)
    for path in exported.files:
        print(plain_lines(f"wrote {path}"))


def _unused_option(*values: object) -> str:
    """Return the name of the first given option that has no effect on a spec for OSMO; empty if there is none."""
    names = ("--pool", "--python", "--setup", "--env")
    return next((name for name, value in zip(names, values, strict=True) if value), "")


def _as_json(target: _Target, exported: Exported) -> dict[str, object]:
    return {
        "to": target.value,
        "text": exported.text,
        "files": [str(path) for path in exported.files],
        "warnings": [problem.as_json() for problem in exported.warnings],
    }
