"""Streams that are closed, full or without a reader, and text that is not UTF-8: no command reports an internal error."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distflow.lifecycle.states import WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli


def _run(cli: Cli, *arguments: str, shell: str = '"$@"', **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f"set -o pipefail; {shell}", "bash", sys.executable, "-m", "distflow", *arguments]
    return subprocess.run(
        command, env=cli.environment | environment, cwd=cli.folder, capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def _without_reader(cli: Cli, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "distflow", *arguments]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, env=cli.environment, cwd=cli.folder) as process:
        os.close(write)
        yield process


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(cli: Cli, closed: str) -> None:
    for command in (["workflow", "list"], ["pool", "list"]):
        done = _run(cli, *command, shell=f'"$@" {closed}')
        assert (done.returncode, done.stderr) == (0, "")


def test_a_spec_from_a_closed_input_is_empty(cli: Cli) -> None:
    done = _run(cli, "workflow", "validate", "-", shell='"$@" <&-')
    assert done.returncode == 2
    assert "the document is empty" in done.stderr


def test_a_reader_that_has_exited_is_not_a_failure(cli: Cli) -> None:
    # More than fits into any buffer, so that the write itself fails.
    assert _run(cli, "schema", shell='"$@" | :').returncode == 0


def test_a_workflow_runs_although_the_reader_of_its_id_has_exited(cli: Cli) -> None:
    (cli.folder / "spec.yaml").write_text("workflow: {name: w, tasks: [{name: t, command: ['true']}]}\n")
    with _without_reader(cli, "workflow", "submit", "spec.yaml") as process:
        assert process.wait(60) == 0
    # The test reads the store itself, because any command would start a supervisor.
    with Store(StateDirectory(cli.state).store) as store:
        wait_until(lambda: store.find("w-1").state is WorkflowState.COMPLETED, timeout_s=60)


def test_all_workflows_are_canceled_although_the_reader_has_exited(cli: Cli) -> None:
    path = cli.folder / "spec.yaml"
    path.write_text("workflow: {name: w, tasks: [{name: t, command: [sleep, '600']}]}\n")
    ids = [cli.submit(str(path)) for _ in range(3)]
    with _without_reader(cli, "workflow", "cancel", *ids) as process:
        assert process.wait(60) == 0
    for one in ids:
        cli.await_status(one, "FAILED_CANCELED")


def test_the_exit_code_does_not_depend_on_a_reader(cli: Cli) -> None:
    (cli.folder / "spec.yaml").write_text("workflow: {name: w, tasks: [{name: t, command: ['false']}]}\n")
    assert cli.run("workflow", "submit", "spec.yaml", "--wait").code == 1
    wrong = "".join(f"key-{number}: of no use\n" for number in range(200))  # whose messages do not fit into a buffer
    (cli.folder / "wrong.yaml").write_text(wrong)
    queries = ((["query", "w-1", "--exit-status"], 1), (["query", "w-2", "-t", "json"], 2), (["query", "w-1"], 0))
    for command, code in (*queries, (["validate", "wrong.yaml", "-t", "json"], 2)):
        with _without_reader(cli, "workflow", *command) as process:
            assert process.wait(60) == code
            assert process.stderr is not None
            assert b"BrokenPipe" not in process.stderr.read()


@pytest.mark.parametrize("command", [["workflow", "list"], ["schema"], ["workflow", "query", "--help"]])
def test_a_full_disk_for_the_output_is_not_reported_as_a_bug(cli: Cli, command: list[str]) -> None:
    done = _run(cli, *command, shell='"$@" > /dev/full')
    message = "error: standard output: No space left on device; free some space and try again\n"
    assert (done.returncode, done.stderr) == (5, message)


def test_the_exit_code_is_kept_when_errors_cannot_be_written(cli: Cli) -> None:
    for streams in ("2> /dev/full", "> /dev/full 2>&1", "> /dev/full 2>&-"):
        assert _run(cli, "workflow", "query", "w-9", "-t", "json", shell=f'"$@" {streams}').returncode == 2


def test_wait_exits_with_4_when_the_reader_of_the_logs_exits(cli: Cli) -> None:
    path = cli.folder / "spec.yaml"
    path.write_text("workflow: {name: w, tasks: [{name: t, command: [sh, -c, 'while :; do echo x; sleep 0.1; done']}]}\n")
    process = cli.start("workflow", "submit", str(path), "--wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "w-1\n"
    process.stdout.close()
    assert process.wait(60) == 4
    assert process.stderr is not None
    with process.stderr:
        assert "w-1 continues to run, but the program that read the logs, such as `head`, has exited" in process.stderr.read()
    assert cli.run("workflow", "cancel", "w-1", "--force", "--wait", "30").code == 0


def test_characters_outside_the_output_encoding_are_escaped(cli: Cli) -> None:
    (cli.folder / "spec.yaml").write_text("workflow: {name: w, tasks: [{name: t, command: [echo, größe]}]}\n", encoding="utf-8")
    done = _run(cli, "workflow", "submit", "--dry-run", "spec.yaml", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout


def test_a_metric_with_half_a_surrogate_pair_is_shown(cli: Cli) -> None:
    # Half of a surrogate pair: JSON can represent it, and no encoding can.
    command = """[echo, '{"step": 1, "text": "\\ud83d"}']"""
    (cli.folder / "spec.yaml").write_text(f"workflow: {{name: w, tasks: [{{name: t, command: {command}}}]}}\n")
    assert _run(cli, "workflow", "submit", "spec.yaml", "--wait").returncode == 0
    for verb in ("query", "metrics"):
        done = _run(cli, "workflow", verb, "w-1")
        assert done.returncode == 0, done.stderr
        assert "\\ud83d" in done.stdout


def test_files_are_utf_8_in_any_locale(cli: Cli) -> None:
    (cli.folder / "spec.yaml").write_text("workflow: {name: w, tasks: [{name: t, command: [echo, größe]}]}\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = _run(cli, "workflow", "submit", "--dry-run", "spec.yaml", "--scripts", "scripts", **locale)
    assert done.returncode == 0, done.stderr
    assert "größe" in (cli.folder / "scripts" / "t.sh").read_text(encoding="utf-8")


def test_file_names_that_are_not_utf_8_are_listed(cli: Cli) -> None:
    folder = cli.folder / "data"
    folder.mkdir()
    (folder / "caf\udce9").touch()
    done = _run(cli, "data", "list", str(folder))
    assert (done.returncode, done.stdout) == (0, "caf\\udce9\n")
    assert _run(cli, "data", "list", str(folder), "list.txt").returncode == 0
    assert (cli.folder / "list.txt").read_bytes() == b"caf\xe9\n"


def test_missing_directories_are_reported(cli: Cli) -> None:
    path = cli.folder / "spec.yaml"
    path.write_text("workflow: {name: w, tasks: [{name: t, command: ['true']}]}\n")
    done = _run(cli, "workflow", "submit", str(path), "--dry-run", "--scripts", "/dev/null/x")
    assert (done.returncode, "--scripts: `/dev/null/x/blobs` cannot be written: Not a directory" in done.stderr) == (2, True)
    done = _run(cli, "workflow", "validate", str(path), shell='mkdir gone && cd gone && rmdir ../gone && "$@"')
    assert (done.returncode, "the working directory no longer exists" in done.stderr) == (2, True)


def test_an_end_of_input_is_not_a_value_for_a_credential(cli: Cli) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "distflow", "credential", "set", "wandb", "--payload-file", "key=-"]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=cli.environment, cwd=cli.folder, start_new_session=True
    )
    os.close(terminal)
    output = bytearray()

    def read() -> bool:
        try:
            output.extend(os.read(controller, 4096))
        except OSError:
            return True  # the command has closed the terminal
        return b"key: " in output

    wait_until(read, timeout_s=30)
    os.write(controller, b"\x04")
    wait_until(lambda: read() and process.poll() is not None, timeout_s=30)
    os.close(controller)
    assert process.wait() == 2
    assert b"no value was given" in output
