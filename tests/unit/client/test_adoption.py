"""Adoption of workflows that another command stores at the same time."""

from __future__ import annotations

from pathlib import Path

from distflow.backends.machines.cleanup import FoundWorkflow, UnknownWorkflows
from distflow.client.adoption import AdoptableWorkflow, _adopt, _gather
from distflow.client.client import Client
from distflow.client.notifications.targets import set_profile_notify
from distflow.lifecycle.states import WorkflowState
from distflow.pools.model import Pool
from distflow.state.directory import StateDirectory
from distflow.state.record import WorkflowRecord
from distflow.state.store import Store
from distflow.supervisor.workflow_copies import AdoptedAttempt, WorkflowCopy
from unit.state.stored import plan_of, running_group, submit, supervised, workflow


def adoptable(record: WorkflowRecord) -> AdoptableWorkflow:
    attempts = {
        f"{record.uuid}/training/{name}/0": AdoptedAttempt(node=f"{name}-node", phase="running")
        for name in ("master", "worker")
    }
    copy = WorkflowCopy(record=record, plan=plan_of(record), template="", spec="", host="theirs")
    return AdoptableWorkflow(
        uuid=record.uuid, pool=Pool(name="lab", backend="ssh", nodes=()), copy=copy, is_own=True, attempts=attempts
    )


def test_a_workflow_that_is_already_stored_is_skipped_and_others_are_adopted(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    ours, theirs = (
        workflow([running_group()], state=WorkflowState.RUNNING, name=name, number=number)
        for number, name in enumerate(("ours", "theirs"), 1)
    )
    with Store(directory.store) as store:
        submit(store, ours)
    with supervised(directory), Client(environ={"DISTFLOW_STATE": str(tmp_path)}) as client:
        mine = set_profile_notify(client, ["{command: [sh]}"])
        adopted = _adopt(client, [adoptable(ours), adoptable(theirs)], False)
    assert [(one.uuid, one.skipped) for one in adopted] == [(theirs.uuid, "")]
    with Store(directory.store) as store:
        assert [event.kind for event in store.events(ours.uuid)] == []
        assert store.find(theirs.uuid).state is WorkflowState.RUNNING
        assert (
            [target.command for target in store.notify_targets(theirs.uuid)] == [target.command for target in mine] == [("sh",)]
        )


def test_a_workflow_with_an_invalid_copy_is_skipped_with_the_name_of_the_node(tmp_path: Path) -> None:
    answer = UnknownWorkflows(
        pool=Pool(name="lab", backend="ssh", nodes=()),
        node="n2",
        workflows=(FoundWorkflow(uuid="u", memo="{}", attempts=()),),
    )
    found, (skipped,) = _gather([answer], tmp_path)
    assert not found
    assert "the copy of the workflow's record on n2 (workflow.json) is not valid" in skipped.skipped
