"""Copies of workflow records on nodes: their signatures, and the checks of unsigned ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.backends.base import AttemptKey
from distflow.errors import StateError
from distflow.lifecycle.states import State, WorkflowState
from distflow.plan.model import Plan, PlannedCheckpoint, PlannedFile
from distflow.spec.model import DataSpec
from distflow.state.codec import encode
from distflow.state.record import CheckpointRecord, DataKind, DataRef, Saved, TransferRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.commands import Prepare
from distflow.supervisor.snapshot import StoredWorkflow
from distflow.supervisor.workflow_copies import AdoptedAttempt, WorkflowCopy, encode_copy, output_urls, read_copy, rebuild
from distflow.testing.backend import Behavior
from unit.state.stored import plan_of, running_group, submit, task, workflow
from unit.supervisor import gangs

DIGEST = "ab" * 32


def record_and_plan() -> tuple[WorkflowRecord, Plan]:
    """A workflow with all kinds of names that become paths on this machine."""
    group = running_group()
    group = replace(
        group,
        earlier=(task("worker", State.RESCHEDULED, attempt=0, saved=Saved(at=1.0, digest=DIGEST)),),
        attempt=1,
        transfer_results=(
            TransferRecord(data=DataRef(DataKind.FETCH, 0), task="master", at=1.0, url="s3://b/x", digest=DIGEST),
        ),
        checkpoints=(CheckpointRecord(task="master", number=0, digest=DIGEST),),
        tasks=tuple(replace(one, attempt=1) for one in group.tasks),
    )
    record = replace(workflow([group], state=WorkflowState.RUNNING), id="digits-7", number=7)
    file = PlannedFile(path="files/x", shown="/x", blob=DIGEST)
    plan = plan_of(record)
    return record, replace(
        plan, groups=tuple(one.with_launches(lambda old: replace(old, files=(file,))) for one in plan.groups)
    )


@cache
def encoded_copy() -> str:
    """An unsigned copy."""
    record, plan = record_and_plan()
    return encode(WorkflowCopy(record=record, plan=plan, template="t", spec="s", host="laptop")).decode()


def copy_with_output(url: str, checkpoint: str = "") -> WorkflowCopy:
    """A copy whose tasks write an output to a URL, and optionally a checkpoint to another one."""
    record, plan = record_and_plan()
    points = (PlannedCheckpoint(place="files/m", shown="/m", url=checkpoint, every_s=60.0),) if checkpoint else ()

    def change(launch: Any) -> Any:
        return replace(launch, url_outputs=(DataSpec(position=0, url=url),), checkpoints=points)

    groups = tuple(one.with_launches(change) for one in plan.groups)
    return WorkflowCopy(record=record, plan=replace(plan, groups=groups), template="", spec="", host="")


def test_signature_detects_every_change_of_a_record(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    with Store(tmp_path / "store") as store:
        record = submit(store, workflow([running_group()], state=WorkflowState.RUNNING))
        stored = StoredWorkflow(record=record, plan=plan_of(record))
        key = AttemptKey(workflow=record.uuid, group="training", attempt=0, task="master", node="n1")
        command = Prepare("lab", key)
        text = encode_copy(stored, command, store, "laptop", mine)
    copy, is_own = read_copy(text, mine, "n1")
    assert (copy.record, copy.host, is_own) == (record, "laptop", True)
    # A version without signatures can read the copy, and this version can read copies without a signature.
    assert json.loads(text)["host"] == "laptop"
    unsigned = re.sub(r',"mac":"[0-9a-f]+"', "", text)
    for changed in (unsigned, text.replace('"laptop"', '"l4ptop"'), text.replace('"mac":"', '"mac":"0')[:-3] + '"}'):
        assert read_copy(changed, mine, "n1")[1] is False
    assert read_copy(text, other, "n1")[1] is False
    assert not list(other.iterdir()), "reading must not create a key"
    # The token of a gang, which its nodes have, is not a valid signing key.
    assert read_copy(text[:-66] + DIGEST + '"}', mine, "n1")[1] is False


def put(path: str, value: object) -> Callable[[Any], None]:
    """Return a function that puts a value at a path of a JSON document."""

    def change(document: Any) -> None:
        *parents, last = path.split(".")
        for part in parents:
            document = document[int(part) if part.isdigit() else part]
        document[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("record.uuid", "../../x"), put("record.id", "../x-7"), put("record.name", "a/b"), put("record.number", 10**30),
        put("record.groups.0.name", ".."), put("record.groups.0.tasks.0.name", "../../.ssh"),
        put("record.groups.0.tasks.0.attempt", -1), put("record.groups.0.earlier.0.name", "unplanned"),
        put("record.groups.0.earlier.0.saved.digest", "../../.ssh/authorized_keys"),
        put("record.groups.0.carried.0.digest", "/etc/passwd"), put("record.groups.0.checkpoints.0.digest", "x"),
        put("record.groups.0.kept", {"uuid": "../x", "id": "x-1"}), put("record.groups", []),
        put("plan.groups.0.launches.0.files.0.blob", "../authorized_keys"), put("plan.groups.0.launches.0.task", "a\0b"),
        put("plan.groups", []), put("record.submitted_at", float("inf")), put("host", {"a": []}),
    ],
)  # fmt: skip
def test_copy_with_unsafe_paths_or_invalid_values_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    document = json.loads(encoded_copy())
    change(document)
    with pytest.raises(StateError, match=r"on n1 \(workflow\.json\) is not valid"):
        read_copy(json.dumps(document), tmp_path, "n1")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"record":' * 50_000, "9" * 5000, "", "null", '{"a": "\ud800"}'])
def test_copy_that_cannot_be_decoded_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"on n1 \(workflow\.json\) is not valid"):
        read_copy(text, tmp_path, "n1")


@pytest.mark.parametrize(
    ("url", "checkpoint", "is_local"),
    [
        ("file:///home/me", "", True), ("/home/me", "", True), ("sftp://host/home", "", True), ("", "", True),
        ("{{workflow_id}}:///x", "", True), ("s3://bucket/x", "", False), ("s3://bucket/x", "file:///x", True),
        ("s3://bucket/../x", "", True),
    ],
)  # fmt: skip
def test_urls_that_this_machine_writes_are_found(url: str, checkpoint: str, is_local: bool) -> None:
    found, stores = output_urls(copy_with_output(url, checkpoint))
    assert bool(found) is is_local
    assert stores == (["s3://bucket/x"] if url == "s3://bucket/x" else [])


def paths_in(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document."""
    items = document.items() if isinstance(document, Mapping) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


PATHS = sorted(paths_in(json.loads(encoded_copy())), key=str)
TEXTS = ["", "..", "../../x", "/etc", "a/b", "a\0", "\ud800", "x" * 5000]
OTHERS: list[object] = [-1, 0, 10**18, 10**40, 1e300, True, None, {}, []]
HOSTILE: st.SearchStrategy[object] = st.one_of(st.sampled_from([*TEXTS, *OTHERS]), st.text(max_size=8), st.integers())


@given(changes=st.lists(st.tuples(st.sampled_from(PATHS), HOSTILE), min_size=1, max_size=4))
def test_a_changed_copy_is_refused_or_has_only_safe_names(
    changes: list[tuple[tuple[Any, ...], object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = deepcopy(json.loads(encoded_copy()))
    for path, value in changes:
        with suppress(KeyError, IndexError, TypeError):
            parent = document
            for part in path[:-1]:
                parent = parent[part]
            parent[path[-1]] = value
    try:
        copy, is_own = read_copy(json.dumps(document), tmp_path_factory.getbasetemp(), "n1")
    except StateError:
        return
    assert not is_own
    plain = re.compile("[A-Za-z0-9_-]+")
    for group in copy.record.groups:
        assert plain.fullmatch(group.name)
        assert all(plain.fullmatch(one.name) and one.attempt >= 0 for one in group.attempts)
        assert all(re.fullmatch("[0-9a-f]{64}|", one.digest) for one in (*group.transfer_results, *group.checkpoints))  # type: ignore[attr-defined]
    attempts = {f"{copy.record.uuid}/training/master/1": AdoptedAttempt(node="n1", phase="running")}
    rebuilt = rebuild(copy, attempts, nodes=["n1"], now=5.0)
    assert all(one.retry.limit == 0 for group in rebuilt.plan.groups for one in group.sizes)


def test_adopted_task_gets_its_start_time_when_its_unreachable_node_returns() -> None:
    records: list[WorkflowRecord] = []

    def behave(_: AttemptKey) -> Behavior:
        records.append(driver.record())
        return Behavior(seconds=60)

    driver = gangs.Driver(gangs.workflow(), behavior=behave)
    driver.settle()
    copy = WorkflowCopy(record=records[-1], plan=driver.workflows["u1"].plan, template="", spec="", host="theirs")
    driver.backend.cut("n2")
    adopted = AdoptedAttempt(node="n1", phase="running", pid=1, started_at=driver.clock.now(), directory="/r/u1/train/t0/0")
    rebuilt = rebuild(copy, {"u1/train/t0/0": adopted}, nodes=["n1", "n2"], now=driver.clock.now())
    driver.rewrite(rebuilt.record)
    driver.advance(1.0)
    assert (driver.group().state, driver.group().task("t1").started_at) == (State.RUNNING, None)
    driver.backend.heal("n2")
    driver.settle()
    assert driver.group().task("t1").started_at == driver.group().task("t0").started_at
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.backend.starts) == 2
