"""``distflow workflow``: the table of its commands."""

from __future__ import annotations

import typer

from distflow.cli.lazy import LazyGroup, commands

__all__ = ["app"]


class _Workflow(LazyGroup):
    table = commands(
        {
            "submit": ("distflow.cli.submit:submit_app", "Check a spec, place it and run it."),
            "restart": ("distflow.cli.restart:app", "Run what did not complete once more."),
            "validate": ("distflow.cli.submit:validate_app", "Check a spec, offline, and start nothing."),
            "query": ("distflow.cli.query:app", "Show where a workflow stands."),
            "why": ("distflow.cli.why:app", "Tell why a workflow failed: first cause and timeline."),
            "diagnose": ("distflow.cli.diagnose:app", "Tell a failure's cause and remedy."),
            "list": ("distflow.cli.list:app", "List workflows, the newest last."),
            "logs": ("distflow.cli.logs:app", "Show what the tasks print."),
            "metrics": ("distflow.cli.metrics:app", "Show the metrics that its tasks print."),
            "events": ("distflow.cli.events:app", "Tell a workflow's story."),
            "stacks": ("distflow.cli.stacks:app", "Show where its processes are just now."),
            "exec": ("distflow.cli.exec:app", "Run a command beside a running task."),
            "rsync": ("distflow.cli.rsync:app", "Copy files to and from a running task."),
            "port-forward": ("distflow.cli.forward:app", "Reach ports of a running task's node from here."),
            "cancel": ("distflow.cli.cancel:app", "End workflows."),
            "adopt": ("distflow.cli.adopt:app", "Take in workflows that lie on the nodes and that the store does not know."),
            "tag": ("distflow.cli.tag:app", "Put tags on workflows, and take them off."),
            "spec": ("distflow.cli.spec:app", "Print a workflow's spec as it ran, or as it was written."),
        }
    )


app = typer.Typer(
    cls=_Workflow, no_args_is_help=True, help="Submit, watch and end workflows.", rich_markup_mode=None, add_completion=False
)


@app.callback()
def _workflow() -> None:
    pass
