"""Everyday commands: submit with ``--wait``, query, cancel, spec, clean."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from xml.etree import ElementTree as ET

from outputs import assert_documented
from scenarios.conftest import Cli

SPEC = """
workflow:
  name: work
  timeout: {TIMEOUT}
  tasks:
  - {name: only, command: [sh, -c, 'COMMAND']}
"""


def _spec(cli: Cli, command: str, timeout: str = "exec_timeout: 10m") -> str:
    return cli.spec(SPEC.replace("COMMAND", command).replace("TIMEOUT", timeout))


def test_submit_wait_prints_the_output_and_exits_with_the_result(cli: Cli) -> None:
    good = cli.run("workflow", "submit", _spec(cli, "echo one; echo two; echo 1 > {{output}}/a"), "--wait")
    assert good.code == 0
    assert "[only] one\n[only] two\n" in good.out
    assert good.err.splitlines()[-1].endswith(": distflow workflow fetch work-1")
    bad = cli.run("workflow", "submit", _spec(cli, "echo before; exit 3"), "--wait")
    assert bad.code == 1
    assert "before" in bad.out
    end = bad.err[bad.err.index("First cause: only on local: exit code 3\n") :].splitlines()
    assert end[1:3] == ["  | before", "Logs:    distflow workflow logs work-2 --task only"]
    assert [line.split()[0] for line in end[3:]] == ["Details:"], "a task that wrote no files has no outputs"
    assert "Outputs " in cli.run("workflow", "query", "work-1").out
    assert "Outputs " not in cli.run("workflow", "query", "work-2").out


def test_json_output_is_one_document_with_the_documented_schema(cli: Cli) -> None:
    done = cli.run("workflow", "submit", _spec(cli, "echo one"), "--wait", "-t", "json")
    assert json.loads(done.out)["status"] == "COMPLETED"
    assert json.loads(done.out)["outputs_until"] == cli.query("work-1")["outputs_until"] is not None
    assert_documented(json.loads(done.out), "query")
    assert_documented(cli.query("work-1", "--verbose"), "query")
    assert_documented(json.loads(cli.run("workflow", "list", "-t", "json").out), "list")
    assert_documented(json.loads(cli.run("workflow", "events", "work-1", "--format-type", "json").out), "events")
    assert_documented(json.loads(cli.run("workflow", "outputs", "work-1", "-t", "json").out), "outputs")
    again = cli.run("workflow", "submit", "work-1", "--format-type", "json")
    assert again.code == 0, again.err
    assert_documented(json.loads(again.out), "submit")
    assert cli.run("schema", "--output", "query", "--config").code == 2


def test_github_format_prints_annotations_and_writes_a_summary_and_a_junit_report(cli: Cli) -> None:
    cli.environment |= {"GITHUB_STEP_SUMMARY": str(cli.folder / "summary.md"), "GITHUB_WORKSPACE": str(cli.folder)}
    spec = _spec(cli, "echo ::error::not a command; no-such-program")
    arguments = ("--wait", "--format-type", "github", "--junit", "junit.xml")
    done = cli.run("workflow", "submit", "spec.yaml", *arguments)
    assert done.code == 1
    assert Path(spec).read_text().splitlines()[5].startswith("  - {name: only")
    assert "::error file=spec.yaml,title=work-1 only-group%3A FAILED,line=6,col=6::only on " in done.out
    lines = done.out.splitlines()
    (stop,) = (line for line in lines if line.startswith("::stop-commands::"))
    (shown,) = (number for number, line in enumerate(lines) if "not a command" in line and line.startswith("[only]"))
    assert lines.index(stop) < shown < lines.index(f"::{stop.removeprefix('::stop-commands::')}::")
    assert "exit code 127%0A" in done.out
    assert "exit code 127%0ADetails" not in done.out, "the remedy is missing"
    summary = (cli.folder / "summary.md").read_text()
    assert "exit code 127" in summary
    assert "no-such-program: not found" in summary
    assert ET.parse(cli.folder / "junit.xml").getroot().get("failures") == "1"
    cli.spec("workflow:\n  name: work\n  tsks: []\n", "wrong.yaml")
    done = cli.run("workflow", "validate", "wrong.yaml", "--format-type", "github")
    assert done.code == 2
    assert "::error file=wrong.yaml,line=3,col=3::unknown key `tsks` in `workflow`%0Adid you mean `tasks`?" in done.out
    assert "| wrong.yaml:3 | error |" in (cli.folder / "summary.md").read_text()
    assert cli.run("workflow", "submit", "spec.yaml", "--junit", "junit.xml").code == 2
    assert cli.run("workflow", "submit", "spec.yaml", "--wait", "--junit", "none/junit.xml").code == 2
    assert [one["name"] for one in json.loads(cli.run("workflow", "list", "-t", "json").out)["workflows"]] == ["work-1"]


def test_interrupting_wait_detaches_and_says_how_to_cancel(cli: Cli) -> None:
    process = cli.start("workflow", "submit", _spec(cli, "echo up; sleep 600"), "--wait")
    assert process.stdout is not None
    # When the command shows output, it follows the workflow. Before that, it may still load modules.
    assert any("up" in line for line in process.stdout)
    cli.await_running("work-1")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "distflow workflow cancel work-1" in errors
    assert cli.query("work-1")["status"] == "RUNNING"
    assert cli.run("workflow", "query", "work-1", "--exit-status").code == 4
    assert cli.run("workflow", "cancel", "work-1", "--wait", "30", "-m", "enough").code == 0
    assert cli.query("work-1")["status"] == "FAILED_CANCELED"
    assert cli.run("workflow", "query", "work-1", "--exit-status").code == 1
    assert "enough" in cli.run("workflow", "events", "work-1").out
    assert cli.run("workflow", "cancel", "work-1").code == 2


def test_a_workflow_that_exceeds_its_exec_timeout_is_ended(cli: Cli) -> None:
    workflow = cli.submit(_spec(cli, "sleep 600", "exec_timeout: 1s"))
    cli.await_status(workflow, "FAILED_EXEC_TIMEOUT")
    assert "exec_timeout" in cli.run("workflow", "query", workflow).out


def test_a_program_that_does_not_exist_is_named(cli: Cli) -> None:
    workflow = cli.submit(cli.spec("workflow: {name: typo, tasks: [{name: only, command: [pyhton3, x.py]}]}"))
    answer = cli.await_status(workflow, "FAILED_START_ERROR")
    assert "pyhton3" in answer["groups"][0]["first_cause"]["message"]


def test_arguments_that_are_not_valid_utf8_are_refused(cli: Cli) -> None:
    folder = f"{cli.folder}/caf\udce9"
    os.mkdir(folder)
    shutil.copy(cli.spec("workflow: {name: w, tasks: [{name: t, command: ['true']}]}"), folder)
    for arguments in (["submit", f"{folder}/spec.yaml"], ["query", "caf\udce9"], ["list", "--name", "caf\udce9"]):
        done = cli.run("workflow", *arguments)
        assert done.code == 2, done.err
        assert "is not valid UTF-8\nrename the file" in done.err
    assert "There are no workflows yet" in cli.run("workflow", "list").out


def test_the_stored_spec_does_not_change_with_its_file(cli: Cli) -> None:
    path = cli.spec(
        "workflow: {name: kept, tasks: [{name: only, command: [echo, '{{word}}']}]}\n\ndefault-values: {word: hi}\n"
    )
    workflow = cli.submit(path)
    cli.spec("changed: yes")
    assert "default-values" in cli.run("workflow", "spec", workflow, "--template").out
    assert "echo, 'hi'" in cli.run("workflow", "spec", workflow).out
    cli.await_status(workflow, "COMPLETED")


def test_node_clean_removes_only_ended_workflows(cli: Cli) -> None:
    ended = cli.submit(_spec(cli, "echo bye"))
    cli.await_status(ended, "COMPLETED")
    running = cli.submit(_spec(cli, "echo up; sleep 600"))
    cli.await_running(running)
    uuid, other = cli.query(ended)["uuid"], cli.query(running)["uuid"]
    assert (cli.root / uuid).is_dir()
    done = cli.run("node", "clean", "--older-than", "0s", "--dry-run", "-t", "json")
    assert json.loads(done.out)["nodes"][0]["removed"] == [uuid]
    assert (cli.root / uuid).is_dir()
    assert cli.run("node", "clean", "--older-than", "0s").code == 0
    assert not (cli.root / uuid).exists()
    assert (cli.root / other).is_dir()
    assert "bye" in cli.logs(ended)
    assert cli.run("workflow", "cancel", running, "--wait", "30").code == 0


def test_a_task_in_pool_local_runs_with_the_submitters_umask(cli: Cli) -> None:
    usual = os.umask(0o22)
    os.umask(usual)
    workflow = cli.submit(_spec(cli, 'umask; echo made > "{{output}}/made"'))
    cli.await_status(workflow, "COMPLETED")
    assert cli.logs(workflow).strip().endswith(f"{usual:04o}")


def test_the_first_example_of_the_help_works_in_an_empty_directory(cli: Cli) -> None:
    (cli.folder / "empty").mkdir()
    example = cli.run("--help", cwd=cli.folder).out.rpartition("Example: ")[2]
    assert example.startswith("distflow ")
    for command in " ".join(example.split()).split(" && "):
        done = cli.run(*command.split()[1:], cwd=cli.folder / "empty")
        assert done.code == 0, done.err
    assert "[worker] rank 1 of 2" in done.out
