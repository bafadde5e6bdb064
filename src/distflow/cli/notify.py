"""``distflow notify``: list and test the entries of ``notify``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_notify
from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.tables import Paint, table
from distflow.client.notifications.delivery import send_test_notification
from distflow.client.notifications.targets import target_problems
from distflow.client.specs import find_notify_targets
from distflow.documents.notify import NotifyTarget, Trigger
from distflow.documents.text import did_you_mean, plain
from distflow.errors import NotFound, NotifyError

__all__ = ["app"]

app = command_app(no_args_is_help=True)

_SpecArgument = Annotated[str | None, typer.Argument(metavar="[FILE]", help="A spec whose entries are included.")]


@app.callback()
def _notify() -> None:
    """List and test notifications about workflows.

    An entry of `notify` defines a target: a URL, a credential that contains a URL, or a command. Entries can be in the
    configuration and in your profile, and, except for commands, in a spec. distflow can notify their targets when a workflow
    starts, ends or waits for a long time.
    """


@app.command("list", epilog="Examples: distflow notify list  ·  distflow notify list train.yaml -t json")
def list_command(file: _SpecArgument = None, format_type: FormatOption = Format.TEXT) -> None:
    """List the entries of `notify`, without their secrets, and the first problem of each."""
    with open_client() as client:
        targets = find_notify_targets(client, file)
        problems = [next((one.message for one in target_problems(client, [target])), "") for target in targets]
    if format_type is Format.JSON:
        rows = [_json(one) | {"problem": problem or None} for one, problem in zip(targets, problems, strict=True)]
        print(json.dumps({"notifications": rows}, indent=2))
    elif not targets:
        _print_no_targets(file)
    else:
        cells = [(*_cells(one), plain(problem)) for one, problem in zip(targets, problems, strict=True)]
        print(table(("Target", "On", "Defined in", "Problem"), cells), end="")


@app.command("test", epilog="Examples: distflow notify test  ·  distflow notify test --name team --on failed")
def send_test_messages(
    file: _SpecArgument = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="Only the target with this name; may be repeated.", autocompletion=complete_notify),
    ] = None,
    on: Annotated[
        Trigger | None, typer.Option("--on", help="The event to report. Default: the first event of the target.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Send one test message to each target, without retries.

    The message is marked with `test`. The exit code is 3 if a message could not be sent or was not accepted.
    """
    with open_client() as client:
        targets = _named(find_notify_targets(client, file), name or ())
        errors, paint = [], Paint.of(sys.stdout)
        for target in targets:
            errors.append(send_test_notification(client, target, on))
            if format_type is Format.TEXT:
                result = paint.bad(f"not sent: {plain(errors[-1])}") if errors[-1] else "sent"
                print(f"{plain(target.label)}: {result}", flush=True)
    if format_type is Format.JSON:
        rows = [_json(one) | {"sent": not error, "error": error or None} for one, error in zip(targets, errors, strict=True)]
        print(json.dumps({"notifications": rows}, indent=2))
    elif not targets:
        _print_no_targets(file)
    if any(errors):
        raise typer.Exit(NotifyError.exit_code)


def _print_no_targets(file: str | None) -> None:
    where = f"the configuration, your profile or {plain(file)}" if file else "the configuration or your profile"
    print(f"No target is notified: `notify` is not in {where}. See `distflow profile set --help`.", file=sys.stderr)


def _named(targets: Sequence[NotifyTarget], names: Sequence[str]) -> Sequence[NotifyTarget]:
    known = [target.label for target in targets]
    for name in names:
        if name not in known:
            raise NotFound(f"there is no notification target `{name}`", hint=did_you_mean(name, known, what="targets"))
    return [target for target in targets if not names or target.label in names]


def _cells(target: NotifyTarget) -> tuple[str, str, str]:
    return (
        plain(target.label),
        ", ".join(trigger.value for trigger in target.on),
        plain(f"{Path(target.where.file).name}:{target.where.line}"),
    )


def _json(target: NotifyTarget) -> dict[str, object]:
    return {
        "name": target.label,
        "credential": target.credential or None,
        "command": list(target.command) or None,
        "on": [trigger.value for trigger in target.on],
        "after_s": target.after_s if Trigger.WAITING in target.on else None,
        "file": target.where.file,
        "line": target.where.line,
    }
