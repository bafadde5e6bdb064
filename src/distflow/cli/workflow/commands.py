"""``distflow workflow``: the table of its subcommands."""

from __future__ import annotations

import typer

from distflow.cli.options import LazyGroup, commands

__all__ = ["app"]


class _Workflow(LazyGroup):
    table = commands(
        {
            "submit": ("distflow.cli.workflow.submit:submit_app", "Check a spec, place it and run it."),
            "restart": ("distflow.cli.workflow.submit:restart_app", "Run what did not complete once more."),
            "validate": ("distflow.cli.workflow.submit:validate_app", "Check a spec, offline, and start nothing."),
            "query": ("distflow.cli.workflow.query:app", "Show where a workflow stands."),
            "why": ("distflow.cli.workflow.why:why_app", "Tell why a workflow failed: first cause and timeline."),
            "diagnose": ("distflow.cli.workflow.why:diagnose_app", "Tell a failure's cause and remedy."),
            "list": ("distflow.cli.workflow.list:app", "List workflows, the newest last."),
            "logs": ("distflow.cli.workflow.records:logs_app", "Show what the tasks print."),
            "metrics": ("distflow.cli.workflow.records:metrics_app", "Show the metrics that its tasks print."),
            "events": ("distflow.cli.workflow.records:events_app", "Tell a workflow's story."),
            "stacks": ("distflow.cli.workflow.why:stacks_app", "Show where its processes are just now."),
            "exec": ("distflow.cli.workflow.exec:exec_app", "Run a command beside a running task."),
            "rsync": ("distflow.cli.workflow.rsync:app", "Copy files to and from a running task."),
            "port-forward": ("distflow.cli.workflow.exec:port_forward_app", "Reach ports of a running task's node from here."),
            "cancel": ("distflow.cli.workflow.manage:cancel_app", "End workflows."),
            "adopt": (
                "distflow.cli.workflow.manage:adopt_app",
                "Take in workflows that lie on the nodes and that the store does not know.",
            ),
            "tag": ("distflow.cli.workflow.manage:tag_app", "Put tags on workflows, and take them off."),
            "spec": ("distflow.cli.workflow.records:spec_app", "Print a workflow's spec as it ran, or as it was written."),
        }
    )


app = typer.Typer(
    cls=_Workflow, no_args_is_help=True, help="Submit, watch and end workflows.", rich_markup_mode=None, add_completion=False
)


@app.callback()
def _workflow() -> None:
    pass
