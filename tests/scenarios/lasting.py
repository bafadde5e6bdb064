"""A supervisor that does not end between the workflows of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scenarios.conftest import Cli

__all__ = ["lasting_supervisor"]

_SPEC = "workflow: {name: lasts, resources: {default: {cpu: 0, gpu: 0}}, tasks: [{name: one, command: [sleep, '600']}]}"


@contextmanager
def lasting_supervisor(cli: Cli) -> Iterator[None]:
    """Run a task in the pool ``local`` meanwhile, so that one forked supervisor serves all workflows of the test.

    Otherwise each workflow of a program that uses ``import distflow`` would start a supervisor in a new interpreter.
    """
    workflow = cli.submit(cli.spec(_SPEC, "lasts.yaml"), "--pool", "local")
    try:
        yield
    finally:
        assert cli.run("workflow", "cancel", workflow, "--force", "--wait", "60").code == 0
