"""The Python API as programs and notebooks use it: real processes on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import distflow
from distflow import Group, Spec, Task, Workflow
from distflow.documents.problems import ProblemsFound
from distflow.errors import InputError, NotFound
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

LOSSES = """
for n in 3 2 1; do echo '{"step": '$((4 - n))', "loss": 0.'$n'}'; done
echo $WORD $TOKEN; echo m > {{output}}/model.pt
"""


@pytest.fixture(autouse=True)
def _use_directories_of_cli(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTFLOW_STATE", "DISTFLOW_CONFIG", "HOME"):
        monkeypatch.setenv(name, cli.environment[name])
    monkeypatch.chdir(cli.folder)


def _sleeping_spec(name: str) -> Spec:
    sleep = Task(name="one", command="sleep 600")
    return Spec(name=name, groups=[Group(name="all", tasks=[sleep])])


def test_a_spec_runs_and_its_results_arrive(cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = Task(name="one", command=["sh", "-c", LOSSES], environment={"WORD": "{{word}}"})
    spec = Spec(name="train", tasks=[task], variables={"word": "a"}, labels={"team": "vision"})
    workflow = distflow.submit(spec, set={"word": "hello"}, secrets={"TOKEN": "s3cret"})
    assert (workflow.id, workflow) == ("train-1", distflow.get("train"))
    statuses: list[str] = []
    assert workflow.wait(60, on_update=lambda one: statuses.append(one.status)).raise_for_status() is workflow
    assert (workflow.is_finished, statuses[-1], repr(workflow)) == (True, "COMPLETED", "<Workflow train-1: COMPLETED>")
    assert [line.text for line in workflow.logs(task="one", last=1)] == ["hello ********"]
    ((one,),) = [group.tasks for group in workflow.groups]
    assert (one.name, one.status, one.exit_code, one.node, one.is_lead) == ("one", "COMPLETED", 0, "local", True)
    assert one.started_at is not None
    assert one.started_at.tzinfo is not None
    assert [(metric.step, metric.values) for metric in workflow.metrics("loss")] == [
        (1, {"loss": 0.3}), (2, {"loss": 0.2}), (3, {"loss": 0.1}),
    ]  # fmt: skip
    assert next(workflow.events(follow=True)).code == "submitted"
    assert [file.path for file in workflow.outputs()[0].files] == ["model.pt"]
    workflow.fetch("*.pt", to=tmp_path / "models")
    assert (tmp_path / "models" / "model.pt").read_text() == "m\n"
    page = workflow._repr_html_()
    assert "COMPLETED" in page
    assert "<polyline" in page
    assert distflow.list(labels={"team": "vis*"}, status="completed") == [workflow]
    assert distflow.list(status=["RUNNING", "FAILED"]) == []
    with pytest.raises(NotFound, match="no task `two`"):
        next(workflow.logs(task="two"))
    with pytest.raises(InputError, match="train-1 has already ended"):
        workflow.cancel()
    assert caplog.text == ""


def test_a_failure_is_raised_with_its_cause_and_can_be_restarted(cli: Cli) -> None:
    text = "workflow:\n  name: fails\n  tasks: [{name: <b>, command: [sh, -c, 'echo \"<script>\" >&2; exit 7']}]\n"
    with pytest.raises(ProblemsFound, match="<spec>:3"):
        distflow.submit(text)
    failed = distflow.submit(text.replace("<b>", "one"))
    with pytest.raises(distflow.WorkflowEnded, match=r"(?s)fails-1: FAILED: one on local: exit code 7\n<script>") as raised:
        failed.wait(60).raise_for_status()
    assert raised.value.exit_code == 1
    (failure,) = failed.why()
    assert failure.cause is not None
    assert (failure.cause.task, failure.cause.exit_code) == ("one", 7)
    assert failed.diagnose()[0].group.name == "one-group"
    assert "one on local: exit code 7" in failed._repr_html_()
    restarted = failed.restart()
    assert restarted.wait(60).status == "FAILED"
    assert [one.id for one in distflow.list()] == ["fails-2", "fails-1"]


def test_a_running_workflow_is_followed_and_canceled_without_blocking_the_event_loop(cli: Cli) -> None:
    workflow = distflow.submit(
        {"workflow": {"name": "long", "tasks": [{"name": "one", "command": "sh -c 'echo here; sleep 600'"}]}}
    )

    async def follow() -> None:
        async for line in workflow.logs_async():
            assert line.text == "here"
            break  # the task has not ended, and the loop must end nevertheless
        with pytest.raises(distflow.WaitTimeout, match=r"long-1 has not ended within 0\.1 s: RUNNING"):
            await workflow.wait_async(0.1)
        (result,) = (await asyncio.to_thread(workflow.exec, "sh -c 'echo out; echo err >&2; exit 5'")).values()
        assert (result.returncode, result.stdout, result.stderr) == (5, "out\n", "err\n")
        workflow.cancel("enough")
        assert await workflow is workflow

    asyncio.run(follow())
    assert workflow.status == "FAILED_CANCELED"
    with pytest.raises(InputError, match="no task of long-1 is running; the status of the workflow is FAILED_CANCELED"):
        workflow.exec("true")


def test_submit_accepts_a_priority_and_refuses_an_unknown_one(cli: Cli) -> None:
    cli.configure(cpus=1)
    workflows = [distflow.submit(_sleeping_spec("one")), distflow.submit(_sleeping_spec("two"), priority="high")]
    assert all(isinstance(one, Workflow) for one in workflows)
    wait_until(lambda: "RUNNING" in {one.status for one in workflows}, what="a workflow runs")
    with pytest.raises(InputError, match=r"(?s)`highest` is not a priority.*HIGH"):
        distflow.submit(_sleeping_spec("three"), priority="highest")
    for one in workflows:
        one.cancel(force=True).wait(60)
