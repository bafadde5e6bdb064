"""``distflow run``: run a script or a command on nodes, without a spec."""

from __future__ import annotations

import difflib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distflow.cli.completion import complete_pool
from distflow.cli.context import open_client
from distflow.cli.node_options import (
    EnvOption,
    FromSbatchOption,
    PythonOption,
    RanksOption,
    SetupOption,
    VenvOption,
    parse_node_settings,
)
from distflow.cli.options import Format, FormatOption, HelpCommand, HostfileOption, command_app
from distflow.cli.render.tables import print_notice
from distflow.cli.render.terminal import ProgressLine
from distflow.cli.workflow.submit import DryRunOption, SetEnvOption
from distflow.documents.text import few, plain_lines
from distflow.errors import DistflowError, InputError, WorkflowEnded
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.client.client import Client
    from distflow.client.outputs import FetchedFiles
    from distflow.client.spec_drafts.drafts import Draft
    from distflow.state.record import WorkflowRecord

__all__ = ["run_app"]

run_app = command_app()

_RESULTS = Path("outputs")
"""The default local directory for output files."""


class _Run(HelpCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ``InputError`` for an unknown option, which often belongs to the user's script."""
        written = tuple(args)  # the parser removes words from ``args``
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", None)
            if not name or not hasattr(error, "possibilities"):
                raise
            hint = f"write options of your script after `--`: {_with_script_option(written, name)}"
            near = difflib.get_close_matches(name, error.possibilities or (), n=1, cutoff=0.8)
            if near:
                hint = f"did you mean `{near[0]}`? Or {hint}"
            raise InputError(f"`distflow run` has no option `{name}`", hint=hint) from None


def _with_script_option(words: Sequence[str], name: str) -> str:
    """Return a command line with the option ``name`` and its value after ``--``, and ``…`` for other words."""
    at = next((number for number, word in enumerate(words) if word.partition("=")[0] == name), len(words))
    first = words[0] if not words[0].startswith("-") else "train.py"
    script = next((word for word in words if word.endswith(".py")), first)
    moved = [word for word in words[at : at + 2] if word != script] or [name]
    if len(moved) == 2 and ("=" in moved[0] or moved[1].startswith("-")):
        moved.pop()
    others = " …" if set(words) - {script, "--", *moved} else ""
    return f"distflow run {shlex.quote(script)}{others} -- {shlex.join(moved)}"


@run_app.command(
    "run",
    cls=_Run,
    epilog="Examples: distflow run train.py --nodes 2 --gpus 8 --hostfile hosts.txt -- --lr 0.1"
    "  ·  distflow run --pool lab -- torchrun --nproc_per_node 8 train.py  ·  distflow run --nodes 2 -- nvidia-smi"
    "  ·  distflow run --from-sbatch job.sh --hostfile hosts.txt",
)
def run_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT|COMMAND...", help="A Python script, or any command. Write -- before options of the command."
        ),
    ] = None,
    from_sbatch: FromSbatchOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            help="The number of nodes. Default: as in the torchrun command or sbatch script, or all of the hostfile, or 1.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=0,
            help="GPUs of each node. Default: as in the sbatch script; otherwise one for each process of --nproc-per-node; "
            "without that option, as many as the pool or hostfile defines for each node. If that number is unknown, or smaller "
            "than the value of --nproc-per-node, the default is 0.",
        ),
    ] = None,
    ranks: RanksOption = None,
    hostfile: HostfileOption = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", "-p", help="The pool to run in. Default: your default pool.", autocompletion=complete_pool),
    ] = None,
    python: PythonOption = None,
    setup: SetupOption = None,
    env: EnvOption = None,
    venv: VenvOption = None,
    set_env: SetEnvOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The workflow's name. Default: the name of the script, program or Slurm job.")
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project",
            metavar="DIR",
            help="The directory to send. Default: the current one, or for a script elsewhere, its git repository or directory.",
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The local directory for the output files.")] = _RESULTS,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when the workflow is submitted. Nothing is fetched.")
    ] = False,
    dry_run: DryRunOption = False,
    print_spec: Annotated[
        bool, typer.Option("--print-spec", help="Print the spec that would be submitted, and start nothing.")
    ] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Run a script or a command on nodes, follow its output, and fetch its output files.

    The current directory (see --project) is sent to each node, without files that .gitignore lists. torchrun starts the
    processes of a Python script if there are several; any other command runs once on each node. Files that the command writes
    to outputs/, or to the directory in DISTFLOW_OUTPUT, are fetched at the end. The exit code is that of
    `submit --wait`, or that of the fetch if only the fetch failed.
    """
    settings = parse_node_settings(python, setup, env, venv)
    with open_client() as client:
        if not (dry_run or print_spec):
            client.load_supervisor()
        configuration, hosts = client.configuration(), client.hosts(hostfile)
        client.load_backends(configuration, with_hosts=hosts is not None)

        # Imported while the supervisor process starts, because both take long.
        from distflow.cli.workflow.submission import parse_overrides, print_plan, print_submitted, warn
        from distflow.client.spec_drafts.drafts import spec_text
        from distflow.client.spec_drafts.quick_run import draft_run, unsent_directories
        from distflow.client.submission import SubmitRequest, plan, submit

        overrides = parse_overrides([], [], set_env or [])
        draft = draft_run(
            words or (),
            configuration,
            name=name,
            pool=pool,
            hosts=hosts,
            hostfile=hostfile or "",
            nodes=nodes,
            gpus=gpus,
            ranks=ranks,
            project=project,
            results=to,
            sbatch=from_sbatch,
        )
        if draft.setup and settings.setup is None:
            settings = replace(settings, setup=draft.setup)
        text = spec_text(draft, heading=["Written by `distflow run --print-spec`. To submit it: distflow submit FILE --wait"])
        if print_spec:
            print(text, end="")
            return
        request = SubmitRequest(
            spec="<spec of distflow run, see --print-spec>", text=text, overrides=overrides, pool=pool, hosts=hosts,
            settings=settings,
        )  # fmt: skip
        if dry_run:
            with tempfile.TemporaryDirectory() as blobs:
                print_plan(plan(client, request, blobs=Path(blobs), configuration=configuration), format_type)
            return
        with ProgressLine(sys.stderr, "read") as line:
            planned = plan(client, request, configuration=configuration, on_pack=line.update)
        warn(planned.checked.warnings)
        _announce(draft if settings.setup == draft.setup else replace(draft, setup=""), python, unsent_directories(draft, to))
        is_quiet = not detach and format_type is Format.JSON
        record = submit(client, planned, on_stored=None if is_quiet else lambda stored: print_submitted(stored, format_type))
        if detach:
            _print_fetch(record, to)
        else:
            _finish(client, record, to, format_type)


def _announce(draft: Draft, python: str | None, unsent: Sequence[str]) -> None:
    """Print the command, the settings that distflow chose, and the directories that it does not send, to standard error."""

    def count(number: int | None, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's' if what[-1] != 's' else 'es'}"

    for note in draft.notes:
        print_notice(f"note: {note}")
    program, *arguments = draft.command
    if python is not None and program in ("python", "python3"):
        program = python
    parts = [f"Running `{shlex.join([program, *arguments])}` on {count(draft.nodes, 'node')}"]
    if draft.gpus:
        parts.append(f"{count(draft.gpus, 'GPU')} on each")
    if draft.launcher == "torchrun":
        parts.append(f"torchrun starts {count(draft.ranks, 'process')} on each")
    if draft.setup:
        parts.append(f"after `{draft.setup}`")
    print(plain_lines(", ".join(parts)), file=sys.stderr)
    if unsent:
        print(plain_lines(f"Not sent, because they hold results: {few(unsent, ', ')}"), file=sys.stderr)


def _print_fetch(record: WorkflowRecord, to: Path) -> None:
    """Print the command that fetches the results."""
    option = "" if to == _RESULTS else f" --to {shlex.quote(str(to))}"
    print(plain_lines(f"To fetch the results later: distflow workflow fetch {record.id}{option}"), file=sys.stderr)


def _finish(client: Client, record: WorkflowRecord, to: Path, format_type: Format) -> None:
    """Wait for the end of a workflow, and fetch its results even if it failed.

    Raise the failure of the workflow, if there is one, and otherwise that of the fetch.
    """
    from distflow.cli.workflow.submission import wait_for_end
    from distflow.client.spec_drafts.quick_run import fetch_results

    failure: WorkflowEnded | None = None
    try:
        wait_for_end(client, record, format_type, fetches=True)
    except WorkflowEnded as error:
        failure = error
    except KeyboardInterrupt:
        _print_fetch(record, to)
        raise
    try:
        with ProgressLine(sys.stderr, "fetched") as line:
            fetched = fetch_results(client, record, to, on_progress=lambda one: line.update(one.done, one.total))
    except DistflowError as error:
        if failure is None and format_type is not Format.JSON:
            raise
        print_notice(f"error: {error}")
        # With JSON, standard output already has the document of the workflow.
        raise failure or typer.Exit(error.exit_code) from None
    try:
        if fetched is not None:
            _print_fetched(fetched, to)
    finally:
        if failure is not None:
            raise failure


def _print_fetched(fetched: FetchedFiles, to: Path) -> None:
    """Print the fetched files and notes about them. If some could not be fetched, exit with a failure."""
    from distflow.cli.workflow.outputs import end_fetch, fetched_text

    if fetched.files or fetched.unchanged:
        print(fetched_text(fetched, to), file=sys.stderr)
    elif not fetched.errors and not fetched.problems:
        print("no output files: write files to `outputs/` or to the directory in `DISTFLOW_OUTPUT`", file=sys.stderr)
    end_fetch(fetched)
