"""``distflow init``: write a first spec."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_sample
from distflow.cli.context import open_client
from distflow.cli.node_options import FromSbatchOption, RanksOption
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.tables import print_notice, table
from distflow.client.spec_drafts.drafts import name_of
from distflow.client.spec_drafts.initial_specs import (
    copy_sample,
    draft_from_command,
    draft_from_sbatch,
    draft_from_torchrun,
    list_samples,
    write_draft,
)
from distflow.documents.text import plain_lines
from distflow.errors import InputError
from distflow.structs import replace

__all__ = ["init_app"]

init_app = command_app()


@init_app.command(
    "init",
    epilog="Examples: distflow init --command 'train.py --lr 0.1' --nodes 2 --gpus 8  ·  distflow init --from-sbatch job.sh"
    "  ·  distflow init --from-torchrun 'torchrun --nnodes 2 --nproc_per_node 8 train.py'"
    "  ·  distflow init --sample pytorch-dist",
)
def init(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="The workflow's name; its spec is NAME.yaml. Default: the name of the script, program or Slurm job. "
            "With --sample, NAME sets only the name of the file.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", metavar="TEXT", help="The command, such as 'train.py --lr 0.1'.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="The number of nodes. Default: as in the torchrun command or sbatch script, or 1."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=0,
            help="GPUs of each node; 0 hides all GPUs. Default: as in the sbatch script, or no request. For torchrun's "
            "`--nproc_per_node gpu`: as in the default pool.",
        ),
    ] = None,
    ranks: RanksOption = None,
    from_sbatch: FromSbatchOption = None,
    from_torchrun: Annotated[
        str | None, typer.Option("--from-torchrun", metavar="TEXT", help="Translate a command line of torchrun.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="NAME", help="Copy a sample spec and its scripts.", autocompletion=complete_sample),
    ] = None,
    samples: Annotated[bool, typer.Option("--list-samples", help="List the samples.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Write a spec with comments, from options, a Slurm script, a torchrun command or a sample.

    On a terminal, `distflow init` without options asks for the command, the nodes and the GPUs. Comments in the spec mark
    parts that could not be translated. If a file exists, the command writes nothing and fails, unless you add --force.
    """
    if samples:
        _print_samples(format_type)
        return
    options = [one for one, value in _sources(command, from_sbatch, from_torchrun, sample) if value is not None]
    if sample is not None:
        numbers = (("--nodes", nodes), ("--gpus", gpus), ("--nproc-per-node", ranks))
        options += [one for one, value in numbers if value is not None]
    if len(options) > 1:
        raise InputError(f"{options[0]} and {options[1]} cannot be combined", hint="remove one of them")
    if sample is not None:
        files = copy_sample(sample, file=_file(name), force=force)
        _print_written(files, (), shlex.join(["distflow", "submit", str(files[0]), "--wait"]), format_type)
        return
    source = f" {options[0]}" if options else ""
    if from_sbatch is not None:
        draft, source = draft_from_sbatch(from_sbatch), f"{source} {from_sbatch}"
    elif from_torchrun is not None:
        draft = draft_from_torchrun(from_torchrun)
    elif command is not None:
        draft = draft_from_command(command)
    else:
        draft = draft_from_command(_ask("Command for each node", "train.py"))
        nodes = nodes or int(_ask("Number of nodes", "1", least=1))
        gpus = int(_ask("GPUs of each node", "0", least=0)) if gpus is None else gpus
    if name is not None:
        draft = replace(draft, name=name_of(name))
    file = _file(name) or Path(f"{draft.name}.yaml")
    with open_client() as client:
        configuration = client.configuration()
    draft, to_submit = write_draft(draft, file, configuration, count=nodes, gpus=gpus, ranks=ranks, source=source, force=force)
    _print_written([file], draft.notes, to_submit, format_type)


def _sources(*values: object) -> list[tuple[str, object]]:
    """Return each option that names a source of the spec, with its value."""
    return list(zip(("--command", "--from-sbatch", "--from-torchrun", "--sample"), values, strict=True))


def _file(name: str | None) -> Path | None:
    """Return the path of the spec for a name, which may already end with ``.yaml``."""
    if name is None:
        return None
    return Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")


def _ask(question: str, default: str, *, least: int | None = None) -> str:
    """Ask a question on the terminal. With ``least``, the answer must be a whole number of at least ``least``.

    Raise ``InputError`` if there is no terminal, or if standard input ends.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        hint = "add --command 'train.py', --from-sbatch, --from-torchrun or --sample"
        raise InputError("there is no command for the spec", hint=hint)
    while True:
        print(f"{question} [{default}]: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise InputError("no answer was given, so nothing was written")
        answer = line.strip() or default
        if least is None or (answer.isascii() and answer.isdigit() and int(answer) >= least):
            return answer
        print(f"Write a whole number, {least} or more.", file=sys.stderr)


def _print_samples(format_type: Format) -> None:
    found = list_samples()
    if format_type is Format.JSON:
        rows = [{"name": one.name, "description": one.description, "files": list(one.files)} for one in found]
        print(json.dumps({"samples": rows}, indent=2))
    else:
        print(table(("Sample", "Description"), [(one.name, one.description) for one in found]), end="")


def _print_written(files: list[Path], notes: tuple[str, ...], to_submit: str, format_type: Format) -> None:
    if format_type is Format.JSON:
        print(json.dumps({"files": [str(file) for file in files], "notes": list(notes)}, indent=2))
        return
    for file in files:
        print(plain_lines(f"wrote {file}"))
    for note in notes:
        print_notice(f"note: {note}")
    print(plain_lines(f"Run it: {to_submit}"), file=sys.stderr)
