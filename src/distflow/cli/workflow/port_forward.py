"""``distflow workflow port-forward``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import command_app
from distflow.client.port_forwarding import ForwardedPort, forward_ports
from distflow.errors import InputError

__all__ = ["app", "parse_ports"]

app = command_app()

_MOST = 30


@app.command(
    "port-forward",
    epilog="Examples: distflow workflow port-forward pytorch-dist-3 master --port 6006  ·  … --port 8080:80,9000-9003",
)
def port_forward(
    workflow: WorkflowArgument,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task whose node is meant.")],
    port: Annotated[
        str,
        typer.Option(
            "--port", metavar="LOCAL[:REMOTE],…", help="Ports here and there; ranges a-b or a-b:c-d; lists with commas."
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="The address of this machine to listen on.")] = "localhost",
    connect_timeout: Annotated[
        int, typer.Option("--connect-timeout", metavar="SECONDS", min=1, help="How long the node may take to answer.")
    ] = 60,
) -> None:
    """Reach TCP ports of a running task's node from here, until Ctrl-C or the end of the task.

    What listens there may listen on the node's loopback only. It is the node that is reached, not the task alone: other
    programs there have ports as well.
    """
    pairs = parse_ports(port)
    with open_workflow(workflow, report_age=False) as (client, record):
        forward_ports(client, record, task, pairs, host=host, connect_timeout=connect_timeout, on_ready=_print_ready)


def _print_ready(port: ForwardedPort) -> None:
    words = f"{port.host}:{port.local} is port {port.remote} of {port.node}; Ctrl-C ends it"
    print(words, file=sys.stderr, flush=True)


def parse_ports(text: str) -> list[tuple[int, int]]:
    """Parse ``--port`` into pairs of a local port and a port of the node. Raises ``InputError`` if it is not valid.

    >>> parse_ports("8080:80,9000-9001")
    [(8080, 80), (9000, 9000), (9001, 9001)]
    """
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        ours, colon, theirs = part.partition(":")
        here, there = _range(ours, text), _range(theirs if colon else ours, text)
        if len(here) != len(there):
            raise InputError(f"--port {part}: {len(here)} ports here, and {len(there)} there")
        pairs += zip(here, there, strict=True)
    if len(pairs) > _MOST:
        raise InputError(f"--port names {len(pairs)} ports; at most {_MOST} are forwarded at once")
    if len({ours for ours, _ in pairs}) < len(pairs):
        raise InputError(f"--port {text} names a port of this machine twice")
    return pairs


def _range(text: str, whole: str) -> range:
    first, dash, last = text.partition("-")
    words = (first, last) if dash else (first, first)
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= 65535 for word in words):
        raise InputError(
            f"--port {whole}: {text!r} is no port", hint="write LOCAL or LOCAL:REMOTE, such as 8080:80, or a range 8000-8003"
        )
    if dash and int(first) >= int(last):
        raise InputError(f"--port {whole}: the range {text} is empty")
    return range(int(words[0]), int(words[1]) + 1)
