"""Annotations and summaries of GitHub Actions, and JUnit reports."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from distflow.cli.render.github import problem_lines, problem_summary, workflow_summary
from distflow.cli.render.junit import check_path, junit_text, write_junit
from distflow.documents.problems import Mark, Problem, Severity
from distflow.errors import InputError
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.structs import replace
from unit.state.stored import completed_group, failed_group, workflow


def test_annotations_are_escaped_and_relative_to_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "specs, 100%"
    folder.mkdir()
    (folder / "a:b.yaml").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    wrong = Problem(where=Mark("a:b.yaml", 7, 3), message="100% wrong: a, b\x1b[31m", hint="write\r::set-output::x\nor y")
    warning = Problem(where=Mark("-", 2), message="odd", severity=Severity.WARNING)
    assert list(problem_lines([wrong, warning])) == [
        "::error file=specs%2C 100%25/a%3Ab.yaml,line=7,col=3::100%25 wrong: a, b%0Awrite ::set-output::x%0Aor y",
        "::warning::odd",
    ]


def test_summaries_escape_markup() -> None:
    summary = problem_summary([Problem(where=Mark("a.yaml", 1), message="<b>`x`</b> | [l](http://a)\nnext")])
    assert summary.splitlines()[-1] == "| a.yaml:1 | error | &lt;b&gt;\\`x\\`&lt;/b&gt; \\| \\[l\\](http://a)<br>next |  |"
    group = failed_group()
    assert group.cause is not None
    cause = replace(group.cause, lines=("</pre><script>", "RuntimeError"))
    record = workflow((replace(group, cause=cause),), state=WorkflowState.FAILED, reason=Reason.EXIT_CODE)
    text = workflow_summary(record, {"training": "use `--nproc_per_node` <n>"})
    assert "| training | worker | FAILED | worker-node | 1 |" in text
    assert "<pre>\n&lt;/pre&gt;&lt;script&gt;\nRuntimeError\n</pre>" in text
    assert "worker on worker-node, rank 11: exit code 1" in text
    assert "use \\`--nproc\\_per\\_node\\` &lt;n&gt;" in text


def test_a_junit_report_has_the_first_cause_as_its_only_failure() -> None:
    group = failed_group()
    assert group.cause is not None
    hostile = replace(group.cause, lines=("]]>&<x>", "\x00\ud800\uffff"))
    record = workflow((replace(group, cause=hostile),), state=WorkflowState.FAILED, reason=Reason.EXIT_CODE)
    root = ET.fromstring(junit_text(record).encode("utf-8"))
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "2", "failures": "1", "errors": "0", "skipped": "1",
    }  # fmt: skip
    failure = root.find("testsuite/testcase[@name='worker']/failure")
    assert failure is not None
    assert failure.get("message") == "exit code 1: RuntimeError: shapes differ"
    assert "]]>&<x>" in (failure.text or "")
    skipped = root.find("testsuite/testcase[@name='master']/skipped")
    assert skipped is not None
    assert skipped.get("message") == "another task of its group failed first, so it was stopped"


def test_a_junit_report_has_a_case_for_a_group_that_failed_without_a_task() -> None:
    group = replace(completed_group(), state=State.FAILED, reason=Reason.DATA, message="s3://b/out refused")
    root = ET.fromstring(junit_text(workflow((group,), state=WorkflowState.FAILED, reason=Reason.DATA)).encode())
    assert root.get("failures") == "1"
    assert root.get("tests") == "3"
    failure = root.find("testsuite/testcase[@name='(group)']/failure")
    assert failure is not None
    assert failure.get("message") == "s3://b/out refused"


def test_a_junit_report_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text("old")
    write_junit(workflow((completed_group(),)), path)
    assert ET.parse(path).getroot().get("failures") == "0"
    assert list(tmp_path.iterdir()) == [path]


def test_a_junit_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "junit.xml"):
        with pytest.raises(InputError, match="cannot be written"):
            check_path("--junit", path)
