"""The store: atomic operations, numbers without gaps, errors of one kind, and stores of other versions."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distflow.errors import NotFound, RecordUnreadable, StateError, StoreBroken, StoreTooNew
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.event_details import HangOver, HangSuspected, Message, NodeBecameReachable, NodeBecameUnreachable
from distflow.state.opening import set_aside, state_error
from distflow.state.record import CancelRequest, End, EventRecord, OrphanState, Priority, WorkflowRecord
from distflow.state.search import Search
from distflow.state.store import Store
from distflow.structs import replace
from unit.state.stored import T0, completed_group, failed_group, running_group, submit, task, workflow

WRITERS, EACH = 4, 12

WRITER = """
import sys, uuid
from distflow.structs import replace
from pathlib import Path
from distflow.state.store import Store
from unit.state.stored import completed_group, submit, workflow
with Store(Path(sys.argv[1])) as store:
    for number in range(int(sys.argv[2])):
        print(submit(store, replace(workflow([completed_group()]), uuid=str(uuid.uuid4()))).id)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return an empty store."""
    with Store(tmp_path / "store.sqlite3") as made:
        yield made


def message_event(record_uuid: str, text: str) -> EventRecord:
    return EventRecord(at=T0, details=Message(text=text), workflow=record_uuid)


def test_concurrent_writers_number_workflows_without_gaps_or_repetition(tmp_path: Path) -> None:
    # The file is new for all of them, so its creation is part of the race.
    path = tmp_path / "store.sqlite3"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(EACH)], stdout=subprocess.PIPE, env=environment)
        for _ in range(WRITERS)
    ]
    printed = [writer.communicate()[0].decode().split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    assert sorted(int(one.rpartition("-")[2]) for ids in printed for one in ids) == list(range(1, WRITERS * EACH + 1))
    with Store(path) as store:
        assert {record.id for record in store.list(count=100)} == {one for ids in printed for one in ids}


def test_numbers_are_counted_for_each_name(store: Store) -> None:
    names = ["a", "b", "a", "a-1"]
    ids = [submit(store, workflow(name=name, number=number)).id for number, name in enumerate(names)]
    assert ids == ["a-1", "b-1", "a-2", "a-1-1"]


def test_stored_workflows_are_found_by_id_and_uuid(store: Store) -> None:
    record = submit(store, workflow([failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE, warnings=["w"]))
    assert store.find("digits-1") == store.find(record.uuid) == record
    assert store.plan(record.uuid).name == "digits"
    assert store.pool(record.uuid).backend == "ssh"
    assert store.document(record.uuid, "template").startswith("# template")
    assert store.uuids() == {record.uuid}
    assert store.ids() == {record.uuid: "digits-1"}


def test_a_name_finds_its_latest_run_and_a_dash_the_latest_workflow(store: Store) -> None:
    for number, name in enumerate(["a", "a", "a-1", "b"]):
        submit(store, workflow(name=name, number=number, at=float(number)))
    assert [store.find(key).id for key in ("a", "a-1", "b", "-")] == ["a-2", "a-1", "b-1", "b-1"]


def test_a_missing_name_is_reported_with_similar_ones(store: Store) -> None:
    with pytest.raises(NotFound) as empty:
        store.find("digits-2")
    assert "workflow list" in empty.value.hint
    submit(store, workflow())
    for key in ("digits-2", "digit", "dgits-1", "digist"):
        with pytest.raises(NotFound, match=r"similar ids: digits-1$"):
            store.find(key)


def test_records_and_events_are_saved_together_or_not_at_all(store: Store) -> None:
    record = submit(store, workflow([running_group()], state=WorkflowState.RUNNING))
    after = replace(record, state=WorkflowState.FAILED, groups=(failed_group(),))
    with pytest.raises(StateError):
        store.save([after], [message_event(record.uuid, "fine"), replace(message_event(record.uuid, "no time"), at=object())])  # type: ignore[arg-type]
    assert store.find(record.id) == record
    assert store.events(record.uuid) == ()
    store.save([after], [message_event(record.uuid, "fine")])
    assert store.find(record.id) == after
    assert [event.text for event in store.events(record.uuid)] == ["fine"]


def test_events_continue_after_the_readers_last_one(store: Store) -> None:
    record = submit(store, workflow(), events=[("one", None), ("two", "worker")])
    other = submit(store, workflow(number=2), events=[("elsewhere", None)])
    first = store.events(record.uuid)
    assert [(event.text, event.task) for event in first] == [("one", None), ("two", "worker")]
    store.save([], [message_event(record.uuid, "three"), message_event(other.uuid, "elsewhere")])
    assert [event.text for event in store.events(record.uuid, after=first[-1].sequence)] == ["three"]


def test_any_answer_of_a_node_can_be_stored(store: Store) -> None:
    record = submit(store, workflow([failed_group()], state=WorkflowState.FAILED))
    group = failed_group()
    end = End(ended_at=T0, error={"message": "half of a pair: \ud83d", "loss": float("nan")})
    ended = replace(group.tasks[0], end=end, message="a file's name: \udcff")
    store.save([replace(record, groups=(group.with_task(ended),))], [message_event(record.uuid, "ended: \udcff")])
    kept = store.find(record.uuid).groups[0].task(ended.name)
    assert kept.message == "a file's name: ?"
    assert kept.end == replace(end, error={"message": "half of a pair: ?", "loss": None})
    assert store.events(record.uuid)[-1].text == "ended: ?"


def test_progress_does_not_undo_a_request_to_cancel(store: Store) -> None:
    record = submit(store, workflow([running_group()], state=WorkflowState.RUNNING))
    request = CancelRequest(at=T0, by="bob", message="wrong data")
    store.request_cancel(record.uuid, request, message_event(record.uuid, "bob asked for its end"))
    # The supervisor has not read the request when it saves.
    store.save([record], [])
    assert store.find(record.id).cancel == request
    store.request_cancel(record.uuid, replace(request, force=True), message_event(record.uuid, "again"))
    found = store.find(record.id).cancel
    assert found is not None
    assert found.force


def test_a_second_cancel_request_keeps_the_force_and_the_time_of_the_first(store: Store) -> None:
    record = submit(store, workflow([running_group()], state=WorkflowState.RUNNING))
    for request in (CancelRequest(at=T0, by="bob", force=True), CancelRequest(at=T0 + 50.0, by="eve", message="mine, too")):
        store.request_cancel(record.uuid, request, message_event(record.uuid, "asked for its end"))
    assert store.find(record.id).cancel == CancelRequest(at=T0, by="eve", message="mine, too", force=True)


def test_a_workflow_is_unfinished_until_its_logs_are_complete(store: Store) -> None:
    assert not store.has_unfinished()
    waits = replace(completed_group(), tasks=(task("master"), task("worker", log_complete=False)))
    record = submit(store, workflow([waits]))
    assert [one.id for one in store.unfinished()] == ["digits-1"]
    store.save([replace(record, groups=(completed_group(),))], [])
    assert store.unfinished() == ()
    assert not store.has_unfinished()


def test_possible_orphans_on_a_lost_node_are_listed_but_need_no_supervisor(store: Store) -> None:
    group = completed_group()
    lost = replace(group.tasks[-1], orphan=OrphanState.UNREACHABLE)
    record = submit(store, workflow([replace(group, tasks=(*group.tasks[:-1], lost))]))
    store.save([record], [])
    assert not store.has_unfinished()
    assert [one.groups[0].tasks[-1].orphan for one in store.unfinished()] == [OrphanState.UNREACHABLE]
    store.save([replace(record, groups=(group,))], [])
    assert store.unfinished() == ()


def test_lists_are_filtered_and_the_newest_first(store: Store) -> None:
    ends = [(WorkflowState.COMPLETED, None), (WorkflowState.FAILED, None), (WorkflowState.FAILED, Reason.EXEC_TIMEOUT)]
    for number, (state, reason) in enumerate(ends):
        submit(store, workflow(number=number, at=T0 + number, state=state, reason=reason, pool=f"p{number % 2}"))

    def ids(**filters: object) -> list[str]:
        page = {name: filters.pop(name) for name in ("count", "offset") if name in filters}
        return [record.id for record in store.list(Search(**filters), **page)]  # type: ignore[arg-type]

    assert ids() == ["digits-3", "digits-2", "digits-1"]
    assert ids(count=1, offset=1) == ["digits-2"]
    assert ids(pools=["p0"]) == ["digits-3", "digits-1"]
    assert ids(name="s-2") == ["digits-2"]
    assert ids(name="%") == []
    # A state without a reason is a pair of its own.
    assert ids(statuses=[(WorkflowState.FAILED, None)]) == ["digits-2"]
    two = [(WorkflowState.FAILED, Reason.EXEC_TIMEOUT), (WorkflowState.COMPLETED, None)]
    assert ids(statuses=two) == ["digits-3", "digits-1"]


def test_labels_tags_priorities_and_times_are_searched(store: Store) -> None:
    marks = [
        {"labels": {"team": "vision", "org.example/run": "a-1"}, "priority": Priority.HIGH},
        {"labels": {"team": "speech"}, "user": "bob"},
        {"labels": {"team": "Vision"}, "priority": Priority.LOW},
    ]
    for number, mark in enumerate(marks):
        submit(store, replace(workflow(number=number, at=T0 + number), **mark))  # type: ignore[arg-type]

    def ids(**filters: object) -> list[str]:
        return [record.id for record in store.list(Search(**filters))]  # type: ignore[arg-type]

    assert ids(labels=[("team", "vision")]) == ["digits-1"]
    assert ids(labels=[("team", "*i*")]) == ["digits-3", "digits-1"]
    assert ids(labels=[("team", "(vision|spe*)")]) == ["digits-2", "digits-1"]
    assert ids(labels=[("team", "*"), ("org.example/run", "a-*")]) == ["digits-1"]
    assert ids(without_labels=["org.example/run"]) == ["digits-3", "digits-2"]
    assert ids(priorities=[Priority.HIGH, Priority.LOW]) == ["digits-3", "digits-1"]
    assert ids(users=["bob"]) == ["digits-2"]
    assert ids(submitted_after=T0 + 1) == ["digits-3", "digits-2"]
    assert ids(submitted_after=T0, submitted_before=T0 + 1) == ["digits-1"]
    store.tag(store.find("digits-2").uuid, add=["good"])
    store.tag(store.find("digits-3").uuid, add=["bad", "good"])
    assert ids(tags=["good"]) == ["digits-3", "digits-2"]
    assert ids(tags=["bad", "none"]) == ["digits-3"]


def test_tags_are_removed_before_others_are_added(store: Store) -> None:
    record = submit(store, workflow())
    assert store.tag(record.uuid, add=["b", "a", "b"]) == ("a", "b")
    assert store.tag(record.uuid, add=["a"], remove=["a", "b", "never there"]) == ("a",)
    assert store.find(record.id).tags == ("a",)
    assert store.tags() == {"a": 1}
    # When the supervisor saves a record, the tags stay.
    store.save([record], [])
    assert store.find(record.id).tags == ("a",)


def test_a_store_of_the_first_format_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with Store(path) as store:
        old = submit(store, workflow([completed_group()], warnings=["w"]))
    added = ("priority", "labels", "parent")
    columns = [str(row[1]) for row in _read(path, "PRAGMA table_info(workflows)") if row[1] not in added]
    documents = "workflow, template, spec, plan, pool"
    with sqlite3.connect(path) as db:
        # The tables, columns and version number of the first version.
        db.executescript(f"""
            DROP TABLE tags; DROP TABLE notices;
            DROP INDEX workflows_with_strays; DROP INDEX workflows_unfinished; DROP INDEX workflows_by_time;
            CREATE TABLE old AS SELECT {", ".join(columns)} FROM workflows; DROP TABLE workflows;
            ALTER TABLE old RENAME TO workflows;
            CREATE TABLE old AS SELECT {documents} FROM documents; DROP TABLE documents; ALTER TABLE old RENAME TO documents;
            ALTER TABLE events DROP COLUMN code; ALTER TABLE events DROP COLUMN fields;
            INSERT INTO events (workflow, at, kind, text, grp) VALUES
                ('{old.uuid}', 2, 'state', 'training: may hang: no task has printed', 'training'),
                ('{old.uuid}', 3, 'state', 'training: gives signs of life again', 'training'),
                ('{old.uuid}', 4, 'state', 'training: COMPLETED', 'training'),
                ('{old.uuid}', 5, 'node', 'n1: unreachable: no route', NULL),
                ('{old.uuid}', 6, 'node', 'n1: reachable again', NULL);
            PRAGMA user_version = 1;
        """)
    db.close()
    with Store(path) as store:
        found = store.find(old.id)
        assert found == old
        assert [event.details for event in store.events(old.uuid)][-5:] == [
            HangSuspected(),
            HangOver(),
            Message(text="training: COMPLETED"),
            NodeBecameUnreachable(node="n1", error="no route"),
            NodeBecameReachable(node="n1"),
        ]
        assert (found.priority, found.labels, found.tags, store.folder(old.uuid)) == (Priority.NORMAL, {}, (), None)
        assert store.list(Search(labels=[("team", "*")])) == ()
        store.tag(old.uuid, add=["old"])
        assert submit(store, replace(workflow(number=2), labels={"a": "b"})).id == "digits-2"
    assert {row[0] for row in _read(path, "PRAGMA user_version")} == {8}


def _read(path: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as db:
        rows = db.execute(query).fetchall()
    db.close()
    return rows


def test_a_newer_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreTooNew, match="newer distflow"):
        Store(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


def test_fields_of_a_newer_record_are_ignored_and_missing_ones_have_their_defaults(store: Store) -> None:
    record = submit(store, workflow([completed_group()]))
    text = store._db.execute("SELECT record FROM groups").fetchone()[0]
    raw = json.loads(text)
    raw["color"] = {"of": ["the", "future"]}
    raw["tasks"][0]["mood"] = "fine"
    del raw["tasks"][0]["gpu_ids"]
    store._db.execute("UPDATE groups SET record = ?", (json.dumps(raw).encode(),))
    found = store.find(record.id).groups[0]
    assert found.tasks[0] == replace(completed_group().tasks[0], gpu_ids=())
    assert found.state is State.COMPLETED


def test_a_file_that_is_not_a_store_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(StateError, match="DISTFLOW_STATE"):
        Store(path)


def write_damaged_store(path: Path) -> None:
    """Write a store with damaged pages. It can be opened, and reading it fails."""
    with Store(path) as store:
        for _ in range(40):
            submit(store, replace(workflow([completed_group()]), uuid=str(uuid.uuid4())))
    with path.open("r+b") as file:
        file.seek(4096 * 2)
        file.write(b"\xff" * (path.stat().st_size - 4096 * 2))


def test_a_damaged_store_is_reported_and_set_aside_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    for name in ("broken-2026-11-21", "broken-2026-11-21-2"):
        write_damaged_store(path)
        before = path.read_bytes()
        with pytest.raises(StoreBroken, match=r"damaged.*\n.*workflow adopt"), Store(path) as store:
            store.list()
        aside = set_aside(path, "2026-11-21")
        assert aside == tmp_path / f"store.sqlite3.{name}"
        assert aside.read_bytes() == before
        assert not path.exists()
    with Store(path) as store:
        assert store.list() == ()


def test_only_a_damaged_store_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    assert set_aside(path, "2026-11-21") is None
    with Store(path) as store:
        submit(store, workflow([completed_group()]))
        assert set_aside(path, "2026-11-21") is None
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode=DELETE")
        db.execute("PRAGMA user_version = 99")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert set_aside(path, "2026-11-21") is None
    assert set_aside(path, "2026-11-21") is None
    assert sorted(one.name for one in tmp_path.iterdir()) == ["store.sqlite3"]
    assert _read(path, "SELECT count(*) FROM workflows") == [(1,)]


def test_a_read_only_store_is_read_including_the_last_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.sqlite3"
    with Store(path) as other:
        record = submit(other, workflow([completed_group()]))
        # The last write is not in the file itself until the last connection closes.
        assert Path(f"{path}-wal").stat().st_size > 0
        may = os.access
        monkeypatch.setattr(os, "access", lambda one, mode: not mode & os.W_OK and may(one, mode))
        with Store(path) as store:
            assert store.is_read_only
            assert store.find(record.id).groups == record.groups
            assert store.list()[0].id == record.id
            for write in (lambda: store.tag(record.uuid, add=["x"]), lambda: submit(store, workflow([completed_group()]))):
                with pytest.raises(StateError, match="cannot be written"):
                    write()
        assert not other.is_read_only


def test_a_read_only_store_needs_a_directory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.sqlite3"
    Store(path).close()
    may = os.access
    monkeypatch.setattr(os, "access", lambda one, mode: not mode & os.W_OK and may(one, mode))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(StateError, match="it is read-only, and no directory for a temporary copy of it is writable") as refused:
        Store(path)
    assert refused.value.hint == "set TMPDIR to a writable directory with free space"


@pytest.mark.parametrize("read", [lambda store: store.find("digits-1"), lambda store: store.unfinished()[0]])
def test_a_read_is_a_consistent_snapshot(tmp_path: Path, read: Callable[[Store], WorkflowRecord]) -> None:
    path = tmp_path / "store.sqlite3"
    with Store(path) as reader, Store(path) as writer:
        before = submit(writer, workflow([running_group()], state=WorkflowState.RUNNING))
        after = replace(before, state=WorkflowState.COMPLETED, groups=(completed_group(),))

        def write(statement: str) -> None:
            if "FROM groups" in statement:
                writer.save([after], [])

        reader._db.set_trace_callback(write)
        assert read(reader) == before
        reader._db.set_trace_callback(None)
        assert reader.find(before.id) == after


def test_an_incomplete_record_is_reported_as_unreadable(store: Store) -> None:
    record = submit(store, workflow([completed_group()]))
    store._db.execute("UPDATE groups SET record = ?", (b'{"name": "tra',))
    with pytest.raises(RecordUnreadable, match="cannot be read"):
        store.find(record.id)
    store._db.execute("UPDATE workflows SET unfinished = 1")
    assert store.unfinished() == ()
    assert store.uuids(are_unfinished=True) == {record.uuid}
    assert (store.has_unfinished(), store.has_unfinished(excluded={record.uuid})) == (True, False)


def test_a_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match=rf"^cannot use {tmp_path}/file: Not a directory\n"):
        Store(tmp_path / "file" / "store.sqlite3")
    with pytest.raises(StateError, match="cannot use the state directory"):
        StateDirectory(tmp_path / "file" / "state").ensure()


def test_full_temporary_directory_is_named_instead_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    full = OSError(errno.ENOSPC, "No space left on device", str(path), None, "/tmp/copy")  # as shutil.copyfile raises it
    assert state_error(path, full).message == "cannot use /tmp/copy: No space left on device"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(StateError, match="cannot use"):
        StateDirectory(closed / "state").ensure()
    with pytest.raises(StateError, match="cannot use"):
        Store(closed / "store.sqlite3")


def test_the_file_is_for_its_owner_alone(store: Store) -> None:
    assert store.path.stat().st_mode & 0o777 == 0o600


def test_the_error_of_a_locked_store_has_a_hint(store: Store) -> None:
    store._db.execute("PRAGMA busy_timeout = 0")
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateError, match=r"database is locked\nanother process is using it; try again"):
            store.tag("u1", add=["nightly"])
