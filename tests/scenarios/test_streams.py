"""Standard streams as scripts, terminals and other programs leave them: whatever they are, no command takes it for a bug."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli


def _run(cli: Cli, *arguments: str, shell: str = '"$@"', **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f"set -o pipefail; {shell}", "bash", sys.executable, "-m", "distflow", *arguments]
    return subprocess.run(
        command, env=cli.environment | environment, cwd=cli.folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(cli: Cli, closed: str) -> None:
    for command in (["workflow", "list"], ["pool", "list"]):
        done = _run(cli, *command, shell=f'"$@" {closed}')
        assert (done.returncode, done.stderr) == (0, "")


def test_a_spec_from_a_closed_input_is_an_empty_one(cli: Cli) -> None:
    done = _run(cli, "workflow", "validate", "-", shell='"$@" <&-')
    assert done.returncode == 2
    assert "the document is empty" in done.stderr


def test_a_reader_that_has_gone_is_no_failure(cli: Cli) -> None:
    # More than fits into any buffer, so that the write itself fails.
    assert _run(cli, "schema", shell='"$@" | :').returncode == 0


def test_what_the_encoding_of_the_output_has_not_is_escaped(cli: Cli) -> None:
    (cli.folder / "spec.yaml").write_text("workflow: {name: w, tasks: [{name: t, command: [echo, größe]}]}\n", encoding="utf-8")
    done = _run(cli, "workflow", "submit", "--dry-run", "spec.yaml", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout


def test_a_workflow_is_shown_whatever_its_metrics_hold(cli: Cli) -> None:
    # Half of a character that takes two, as JSON can write it and no encoding can.
    command = """[echo, '{"step": 1, "text": "\\ud83d"}']"""
    (cli.folder / "spec.yaml").write_text(f"workflow: {{name: w, tasks: [{{name: t, command: {command}}}]}}\n")
    assert _run(cli, "workflow", "submit", "spec.yaml", "--wait").returncode == 0
    for verb in ("query", "metrics"):
        done = _run(cli, "workflow", verb, "w-1")
        assert done.returncode == 0, done.stderr
        assert "\\ud83d" in done.stdout


def test_an_end_of_input_is_no_value_for_a_credential(cli: Cli) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "distflow", "credential", "set", "wandb", "--payload-file", "key=-"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=cli.environment, cwd=cli.folder, start_new_session=True
    )
    os.close(theirs)
    said = bytearray()

    def read() -> bool:
        try:
            said.extend(os.read(ours, 4096))
        except OSError:
            return True  # it has hung up
        return b"key: " in said

    wait_until(read, timeout_s=30)
    os.write(ours, b"\x04")
    wait_until(lambda: read() and process.poll() is not None, timeout_s=30)
    os.close(ours)
    assert process.wait() == 2
    assert b"no value was given" in said
