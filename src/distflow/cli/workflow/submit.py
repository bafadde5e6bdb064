"""``distflow workflow submit``, ``validate`` and ``restart``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_pool, complete_priority, complete_workflow
from distflow.cli.context import open_client, open_submit_client
from distflow.cli.node_options import EnvOption, PythonOption, SetupOption, VenvOption, parse_node_settings
from distflow.cli.options import CheckFormat, CheckFormatOption, Format, FormatOption, HostfileOption, command_app
from distflow.cli.render.terminal import ProgressLine
from distflow.cli.workflow.ci import CiReport
from distflow.documents.problems import Problem, ProblemsFound

__all__ = [
    "DryRunOption",
    "SetEnvOption",
    "SetOption",
    "SetStringOption",
    "restart_app",
    "submit_app",
    "validate_app",
]


submit_app = command_app()
validate_app = command_app()

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a template variable. The value is parsed as YAML (3, true, text)."),
]
SetStringOption = Annotated[
    list[str] | None, typer.Option("--set-string", metavar="NAME=VALUE", help="Set a template variable to a string.")
]
SetEnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set-env",
        metavar="NAME[=VALUE]",
        help="Set a secret environment variable in every task. NAME alone takes its value from this environment.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Run all checks and print the plan, without starting anything.")]
PoolOption = Annotated[
    str | None,
    typer.Option("--pool", "-p", help="Use this pool instead of the spec's pool.", autocompletion=complete_pool),
]
FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE|ID", help="A spec (a YAML file), - for standard input, or the id of a workflow to submit again."
    ),
]
LabelOption = Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Add a label; may be repeated.")]

WaitOption = Annotated[
    bool, typer.Option("--wait", "-w", help="Follow the logs until the workflow has ended. Exit with 0 only if it completed.")
]


@submit_app.command(
    "submit",
    epilog="Examples: distflow workflow submit train.yaml --set epochs=3 --wait"
    "  ·  distflow workflow submit train.yaml --dry-run",
)
def submit_workflow(
    file: FileArgument,
    sets: SetOption = None,
    set_string: SetStringOption = None,
    set_env: SetEnvOption = None,
    pool: PoolOption = None,
    hostfile: HostfileOption = None,
    python: PythonOption = None,
    setup: SetupOption = None,
    env: EnvOption = None,
    venv: VenvOption = None,
    priority: Annotated[
        str | None,
        typer.Option(
            "--priority",
            metavar="HIGH|NORMAL|LOW",
            help="The priority in the queue. Default: NORMAL, or the priority of the workflow that is submitted again.",
            autocompletion=complete_priority,
        ),
    ] = None,
    label: LabelOption = None,
    dry_run: DryRunOption = False,
    scripts: Annotated[
        Path | None,
        typer.Option(
            "--scripts", metavar="DIR", help="Write one shell script per task into this directory. Implies --dry-run."
        ),
    ] = None,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight",
            help="First check the nodes like `distflow pool check`, and stop if the check fails. "
            "If Slurm, Kubernetes or Ray chooses the nodes, that system is checked.",
        ),
    ] = False,
    rsync: Annotated[
        str | None,
        typer.Option(
            "--rsync",
            metavar="LOCAL:REMOTE",
            help="Copy LOCAL to the lead task of the first group while this group runs, like `workflow rsync upload --daemon`.",
        ),
    ] = None,
    wait: WaitOption = False,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="With --wait, write a JUnit report with a test case per task."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="With --wait, write a page about the run like `workflow report`."),
    ] = None,
    format_type: CheckFormatOption = CheckFormat.TEXT,
) -> None:
    """Check a spec and run it, and print the workflow's id.

    Ranks, files and resources are checked before anything starts. The workflow continues when this terminal closes. If you give
    the id of a workflow, its spec is submitted again with its pool, labels and priority.
    """
    result_format, report = format_type.result_format, CiReport(format_type, junit, page, is_waiting=wait)
    settings = parse_node_settings(python, setup, env, venv)
    with report.errors(), open_submit_client() as client:
        is_dry = dry_run or scripts is not None
        if not is_dry:
            client.load_supervisor()
        configuration, hosts = client.configuration(), client.hosts(hostfile)
        client.load_backends(configuration, with_hosts=hosts is not None)

        # Imported while the supervisor process starts, because both take long.
        from distflow.cli.search_options import priorities
        from distflow.cli.workflow import submission
        from distflow.client.submission import SubmitRequest, plan, submit

        urgency = priorities([priority])[0] if priority is not None else None
        labels = submission.parse_labels(label or [])
        overrides = submission.parse_overrides(sets or [], set_string or [], set_env or [])
        copied = submission.rsync_paths(rsync) if rsync is not None else None
        request = SubmitRequest(
            spec=file, text=submission.read_stdin(file), overrides=overrides, pool=pool, hosts=hosts, settings=settings,
            labels=labels, priority=urgency,
        )  # fmt: skip
        if is_dry:
            with tempfile.TemporaryDirectory() as blobs:
                planned = plan(client, request, blobs=Path(blobs), configuration=configuration)
                submission.dry_run(planned, scripts, result_format)
            return
        with ProgressLine(sys.stderr, "read") as line:
            planned = plan(client, request, configuration=configuration, on_pack=line.update)
        submission.warn(planned.checked.warnings)
        report.warn(planned.checked.warnings)
        if preflight:
            submission.check_nodes(planned, hostfile)
        record = submission.start(client, submit, planned, wait, result_format)
        if copied is not None:
            from distflow.cli.workflow.rsync import copy_to_first_lead

            copy_to_first_lead(client, record, *copied)
        if wait:
            with report.following(client, planned.checked) as on_end:
                submission.wait_for_end(client, record, result_format, on_end=on_end)


@validate_app.command("validate", epilog="Example: distflow workflow validate train.yaml --set gpus=8")
def validate_specs(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Specs. Each one is checked separately.")],
    sets: SetOption = None,
    set_string: SetStringOption = None,
    pool: PoolOption = None,
    label: LabelOption = None,
    hostfile: HostfileOption = None,
    format_type: CheckFormatOption = CheckFormat.TEXT,
) -> None:
    """Check specs offline, without starting anything.

    The checks include the rank layout. No node is contacted.
    """
    from distflow.cli.workflow import submission
    from distflow.client.specs import validate
    from distflow.client.submission import join_labels

    overrides = submission.parse_overrides(sets or [], set_string or [], [])
    labels = submission.parse_labels(label or [])
    results: list[dict[str, object]] = []
    problems: list[Problem] = []
    report = CiReport(format_type)
    with report.errors(), open_client() as client:
        configuration, hosts = client.configuration(), client.hosts(hostfile)
        for file in files:
            try:
                text = submission.read_stdin(file)
                checked, warnings = validate(client, file, overrides, configuration, pool=pool, hosts=hosts, text=text)
                join_labels(checked.spec.labels, labels)
            except ProblemsFound as error:
                problems += error.problems
                continue
            if format_type.result_format is Format.TEXT:
                submission.warn(warnings)
                report.warn(warnings)
                print(submission.valid_text(file, checked), end="")
            results.append({"file": file, "valid": True, "warnings": [problem.as_json() for problem in warnings]})
        if problems:
            raise ProblemsFound(problems)
    if format_type is CheckFormat.JSON:
        print(json.dumps({"specs": results}, indent=2))


restart_app = command_app()


@restart_app.command("restart", epilog="Example: distflow workflow restart pipeline-3 --wait")
def restart_workflow(
    workflow: Annotated[
        str,
        typer.Argument(metavar="ID", help="The id or uuid of the workflow.", autocompletion=complete_workflow),
    ],
    set_env: Annotated[
        list[str] | None,
        typer.Option(
            "--set-env",
            metavar="NAME[=VALUE]",
            help="Set a secret environment variable again, because its value was not stored.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", "-p", help="Use this pool. Default: the pool of the workflow.", autocompletion=complete_pool),
    ] = None,
    wait: WaitOption = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Rerun the groups that did not complete, as a new workflow.

    Completed groups are kept and do not run. Their outputs are fetched from the nodes for the tasks that need them. The new
    workflow has the same spec, labels and priority. Files that the spec sends are read again.
    """
    from distflow.cli.workflow import submission
    from distflow.client.submission import plan_restart, restart

    overrides = submission.parse_overrides([], [], set_env or [])
    with open_submit_client() as client:
        with ProgressLine(sys.stderr, "read") as line:
            wanted = plan_restart(client, workflow, overrides, pool=pool, on_pack=line.update)
        submission.warn(wanted.planned.checked.warnings)
        record = submission.start(client, restart, wanted, wait, format_type)
        if wait:
            submission.wait_for_end(client, record, format_type)
