"""``distflow workflow``: the table of its subcommands."""

from __future__ import annotations

from typing import Any

import typer

from distflow.cli.options import ALIASES, LazyGroup, commands

__all__ = ["app"]


class _Workflow(LazyGroup):
    table = commands(
        {
            "Run": {
                "submit": ("distflow.cli.workflow.submit:submit_app", "Check a spec and run it."),
                "restart": ("distflow.cli.workflow.submit:restart_app", "Rerun the groups that did not complete."),
                "validate": ("distflow.cli.workflow.submit:validate_app", "Check specs offline, without starting anything."),
                "export": ("distflow.cli.workflow.export:app", "Export a spec to Slurm, Kubernetes, Kubeflow or OSMO."),
                "cancel": ("distflow.cli.workflow.manage:cancel_app", "Cancel workflows."),
            },
            "Watch": {
                "query": ("distflow.cli.workflow.query:app", "Show the status of a workflow and its tasks."),
                "list": ("distflow.cli.workflow.list:app", "List workflows, the newest last."),
                "logs": ("distflow.cli.workflow.records:logs_app", "Print or follow the output of tasks."),
                "metrics": ("distflow.cli.workflow.metrics:app", "Show the metrics and the GPU use of tasks."),
                "events": ("distflow.cli.workflow.records:events_app", "List the events of a workflow."),
            },
            "Debug": {
                "why": ("distflow.cli.workflow.why:why_app", "Show why a workflow failed: first cause and timeline."),
                "diagnose": (
                    "distflow.cli.workflow.why:diagnose_app",
                    "Show the known cause of a failure or hang, and its remedy.",
                ),
                "stacks": ("distflow.cli.workflow.why:stacks_app", "Show the current call stacks of running processes."),
                "exec": ("distflow.cli.workflow.exec:exec_app", "Run a command alongside a running task."),
                "port-forward": (
                    "distflow.cli.workflow.exec:port_forward_app",
                    "Forward local ports to the node of a running task.",
                ),
            },
            "Files": {
                "report": ("distflow.cli.ui.report:app", "Write a report on a workflow to one HTML file."),
                "outputs": ("distflow.cli.workflow.outputs:outputs_app", "List the output files of tasks on their nodes."),
                "fetch": ("distflow.cli.workflow.outputs:fetch_app", "Copy the output files of tasks to this machine."),
                "rsync": ("distflow.cli.workflow.rsync:app", "Copy files to and from a running task."),
                "spec": ("distflow.cli.workflow.records:spec_app", "Print the spec of a workflow."),
            },
            "Manage": {
                "tag": ("distflow.cli.workflow.manage:tag_app", "Add and remove tags of workflows."),
                "adopt": ("distflow.cli.workflow.manage:adopt_app", "Restore workflows of which only the nodes have a record."),
            },
        }
    )

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, by its name or its alias. Return ``None`` if it does not exist."""
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))


app = typer.Typer(
    cls=_Workflow, no_args_is_help=True, help="Submit, watch and cancel workflows.", rich_markup_mode=None, add_completion=False
)


@app.callback()
def _workflow() -> None:
    pass
