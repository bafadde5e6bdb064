"""The store: one SQLite file (WAL) with workflows, groups and an append-only list of events.

``submit`` inserts workflows, ``request_cancel`` writes to a separate table, and the supervisor that holds the lock saves
progress, so that writers do not undo each other's changes. Readers do not wait for writers.

Records of older versions of distflow can be read. In records of newer versions, unknown fields are ignored. A workflow's
record that cannot be decoded raises ``RecordUnreadable``, except in ``Store.unfinished``, which skips it. The schema is
numbered (``PRAGMA user_version``) and migrated step by step. A newer schema is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from distflow.errors import NotFound, StoreTooNew
from distflow.state import opening
from distflow.state.codec import DecodeError, decode, encode, writable
from distflow.state.record import CancelRequest, EventRecord, GroupRecord, WorkflowRecord
from distflow.state.search import Search, where
from distflow.structs import convert, replace

if TYPE_CHECKING:
    from distflow.documents.notify import NotifyTarget
    from distflow.plan.model import Plan
    from distflow.pools.model import Pool
    from distflow.state.notification import Notification

__all__ = ["STORE_FORMAT", "Retention", "Store"]

_MIGRATIONS = (
    """
    CREATE TABLE workflows (
        uuid TEXT PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, number INTEGER NOT NULL,
        user TEXT NOT NULL, pool TEXT NOT NULL, pool_key TEXT NOT NULL, state TEXT NOT NULL, reason TEXT,
        submitted_at REAL NOT NULL, started_at REAL, ended_at REAL,
        unfinished INTEGER NOT NULL DEFAULT 1, warnings TEXT NOT NULL DEFAULT '[]'
    ) WITHOUT ROWID;
    CREATE INDEX workflows_by_time ON workflows (submitted_at DESC);
    CREATE INDEX workflows_unfinished ON workflows (unfinished) WHERE unfinished = 1;
    CREATE TABLE names (name TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE documents (
        workflow TEXT PRIMARY KEY REFERENCES workflows, template TEXT NOT NULL, spec TEXT NOT NULL,
        plan BLOB NOT NULL, pool BLOB NOT NULL
    );
    CREATE TABLE groups (
        workflow TEXT NOT NULL REFERENCES workflows, position INTEGER NOT NULL, record BLOB NOT NULL,
        PRIMARY KEY (workflow, position)
    ) WITHOUT ROWID;
    CREATE TABLE cancels (workflow TEXT PRIMARY KEY REFERENCES workflows, record BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE events (
        sequence INTEGER PRIMARY KEY, workflow TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
        grp TEXT, task TEXT, attempt INTEGER
    );
    CREATE INDEX events_by_workflow ON events (workflow, sequence);
    """,
    "CREATE INDEX workflows_with_strays ON workflows (unfinished) WHERE unfinished = 2",
    """
    ALTER TABLE workflows ADD COLUMN priority TEXT NOT NULL DEFAULT 'NORMAL';
    ALTER TABLE workflows ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE documents ADD COLUMN folder TEXT;
    CREATE TABLE tags (
        workflow TEXT NOT NULL REFERENCES workflows, tag TEXT NOT NULL, PRIMARY KEY (workflow, tag)
    ) WITHOUT ROWID;
    """,
    "ALTER TABLE workflows ADD COLUMN parent TEXT",
    """
    ALTER TABLE events ADD COLUMN code TEXT;
    UPDATE events SET code = 'hang' WHERE text LIKE grp || ': may hang: %';
    UPDATE events SET code = 'hang_over' WHERE text = grp || ': gives signs of life again'
    """,
    "ALTER TABLE events ADD COLUMN fields TEXT",
    """
    ALTER TABLE documents ADD COLUMN notify BLOB;
    CREATE TABLE notices (
        workflow TEXT NOT NULL REFERENCES workflows, target INTEGER NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL,
        at REAL NOT NULL, pending INTEGER NOT NULL DEFAULT 1, PRIMARY KEY (workflow, target, kind, subject)
    );
    CREATE INDEX notices_pending ON notices (at) WHERE pending = 1
    """,
    "ALTER TABLE notices ADD COLUMN deliveries INTEGER NOT NULL DEFAULT 0",
)

STORE_FORMAT = len(_MIGRATIONS)
"""The number of the schema (``PRAGMA user_version``)."""

_FIELDS = (
    "uuid", "id", "name", "number", "user", "pool", "pool_key", "state", "reason", "submitted_at", "started_at", "ended_at",
    "warnings", "priority", "labels", "parent",
)  # fmt: skip
_COLUMNS = ", ".join(_FIELDS)
_ALL = Search()
_NOTIFICATION = "workflow = ? AND target = ? AND kind = ? AND subject = ?"
_TAGS = "(SELECT group_concat(tag) FROM tags WHERE workflow = uuid)"
"""Tags contain no commas."""


class Retention(msgspec.Struct, frozen=True):
    """The fields of a workflow's pool that determine how long its files are kept."""

    backend: str = ""
    retention_s: float | None = None
    """``None`` if it is not stored."""


class Store:
    """The records of this user on this machine.

    Contract, tested by ``tests/contract/test_store.py``:

    1. Every method is one transaction: another process sees all of it or nothing.
    2. ``submit`` numbers workflows of one name 1, 2, 3, … without gaps or repetition, even with concurrent submissions. Only
       ``keep_number`` may leave gaps.
    3. ``save`` writes records and their events together.
    4. It raises only ``StateError`` and ``NotFound``, and ``InputError`` if a search is not valid. ``document``, ``plan``,
       ``pool`` and ``retention`` must be called with the uuid of a stored workflow, and ``document`` with the kind
       ``template`` or ``spec``.
    5. If the file cannot be written, reading still works, and every method that writes raises ``StateError``.
    """

    def __init__(self, path: Path) -> None:
        """Open the store at ``path``, creating or upgrading it if needed."""
        self.path = path
        self._copy = None
        self.is_read_only = False
        """Whether the file cannot be written; this object then reads a copy."""
        with self._errors(), opening.exclusive(path.parent):
            if opening.is_read_only(path):
                self._copy = opening.copy_to_read(path)
            self._db = opening.connect(Path(self._copy.name) / path.name if self._copy else path)
            try:
                version = self._db.execute("PRAGMA user_version").fetchone()[0]
                if version != STORE_FORMAT:
                    self._migrate()
            except BaseException:
                self.close()
                raise
            self.is_read_only = self._copy is not None
            self._version: int | None = None

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()

    def __enter__(self) -> Store:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def submit(
        self,
        record: WorkflowRecord,
        *,
        template: str,
        spec: str,
        plan: Plan,
        pool: Pool,
        folder: str | None = None,
        notify: Sequence[NotifyTarget] = (),
        events: Sequence[EventRecord] = (),
        keep_number: bool = False,
    ) -> WorkflowRecord:
        """Insert a new workflow, assign its number and id, and return it with both.

        The pool is stored as it is now. The supervisor therefore needs no configuration, and later edits do not affect stored
        workflows. ``folder`` is the directory that the spec's ``localpath`` entries are relative to. With ``keep_number`` the
        record already has a number, from another store, and gets another one only if that number is taken.
        """
        with self._transaction():
            number = self._number(record, keep_number)
            record = replace(record, number=number, id=f"{record.name}-{number}")
            self._db.execute(
                f"INSERT INTO workflows ({_COLUMNS}, unfinished) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",  # noqa: S608  constants
                (
                    record.uuid, record.id, record.name, record.number, record.user, record.pool, record.pool_key,
                    record.state.value, record.reason.value if record.reason else None, record.submitted_at, record.started_at,
                    record.ended_at, msgspec.json.encode(record.warnings).decode(), record.priority.value,
                    encode(record.labels).decode(), record.parent, _work_left(record),
                ),
            )  # fmt: skip
            self._db.execute(
                "INSERT INTO documents (workflow, template, spec, plan, pool, folder, notify) VALUES (?,?,?,?,?,?,?)",
                (record.uuid, template, spec, encode(plan), encode(pool), folder, encode(notify) if notify else None),
            )
            self._write_groups(record, record.groups)
            self._write_events(events)
        return record

    def save(
        self, records: Iterable[WorkflowRecord], events: Iterable[EventRecord], notifications: Iterable[Notification] = ()
    ) -> None:
        """Write the progress of workflows together with their events and notifications.

        Only the supervisor may call this.

        A notification that was stored before is not stored again, whether or not it has been sent.
        """
        with self._transaction():
            for record in records:
                self._db.execute(
                    "UPDATE workflows SET state=?, reason=?, started_at=?, ended_at=?, unfinished=?, warnings=? WHERE uuid=?",
                    (
                        record.state.value, record.reason.value if record.reason else None,
                        record.started_at, record.ended_at, _work_left(record),
                        msgspec.json.encode(record.warnings).decode(), record.uuid,
                    ),
                )  # fmt: skip
                self._write_groups(record, record.groups)
            self._write_events(events)
            self._db.executemany(
                "INSERT OR IGNORE INTO notices (workflow, target, kind, subject, at) VALUES (?,?,?,?,?)",
                [(one.workflow, one.target, one.on.value, one.subject, one.at) for one in notifications],
            )

    def count_delivery(self, notification: Notification) -> int:
        """Record that a process begins to deliver a notification. Return the number of such deliveries, including this one."""
        with self._transaction():
            key = _notification_key(notification)
            self._db.execute(f"UPDATE notices SET deliveries = deliveries + 1 WHERE {_NOTIFICATION}", key)  # noqa: S608  a constant
            row = self._db.execute(f"SELECT deliveries FROM notices WHERE {_NOTIFICATION}", key).fetchone()  # noqa: S608  a constant
            return int(row[0])

    def finish_notification(self, notification: Notification, event: EventRecord) -> None:
        """Record that a notification was sent or given up, together with the event that reports it."""
        with self._transaction():
            self._db.execute(f"UPDATE notices SET pending = 0 WHERE {_NOTIFICATION}", _notification_key(notification))  # noqa: S608  a constant
            self._write_events([event])

    def request_cancel(self, workflow: str, request: CancelRequest, event: EventRecord) -> None:
        """Record a user's request to cancel this workflow (uuid). An earlier ``force`` stays in effect."""
        with self._transaction():
            row = self._db.execute("SELECT record FROM cancels WHERE workflow = ?", (workflow,)).fetchone()
            request = request.after(decode(row[0], CancelRequest)) if row else request
            self._db.execute("INSERT OR REPLACE INTO cancels VALUES (?,?)", (workflow, encode(request)))
            self._write_events([event])

    def tag(self, workflow: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> tuple[str, ...]:
        """Remove and add tags of a workflow (uuid), and return its new tags."""
        with self._transaction():
            self._db.executemany("DELETE FROM tags WHERE workflow = ? AND tag = ?", [(workflow, tag) for tag in remove])
            self._db.executemany("INSERT OR IGNORE INTO tags VALUES (?,?)", [(workflow, tag) for tag in add])
            return tuple(
                row[0] for row in self._db.execute("SELECT tag FROM tags WHERE workflow = ? ORDER BY tag", (workflow,))
            )

    def tags(self) -> dict[str, int]:
        """Return all tags, each with the number of its workflows."""
        with self._errors():
            return dict(self._db.execute("SELECT tag, count(*) FROM tags GROUP BY tag ORDER BY tag").fetchall())

    def find(self, key: str) -> WorkflowRecord:
        """Return a workflow, with its groups.

        Args:
            key: The id or uuid of a workflow. Otherwise a workflow name, for its latest run, or ``-``, for the latest workflow.

        Raises:
            NotFound: if there is none; the error suggests similar ids.

        """
        with self._transaction("DEFERRED"):
            select = f"SELECT {_COLUMNS}, {_TAGS} FROM workflows WHERE"  # noqa: S608  only constants are pasted
            row = self._db.execute(f"{select} id = ? OR uuid = ?", (key, key)).fetchone()
            if row is None:
                latest = f"{select} ? IN (name, '-') ORDER BY submitted_at DESC, number DESC LIMIT 1"
                row = self._db.execute(latest, (key,)).fetchone()
            if row is None:
                raise NotFound(f"there is no workflow `{key}`", hint=self._similar_ids(key))
            return self._complete(_workflow(row))

    def unfinished(self) -> tuple[WorkflowRecord, ...]:
        """Return every workflow that the supervisor still has work for, oldest first, with its groups.

        They include workflows that have ended, but have attempts on an unreachable node. These attempts must still be stopped.
        Records that cannot be read, because another version of distflow wrote them, are skipped so that they do not block
        other workflows.
        """
        found = []
        with self._transaction("DEFERRED"):
            rows = self._db.execute(
                f"SELECT {_COLUMNS}, {_TAGS} FROM workflows"  # noqa: S608  constants
                " WHERE unfinished IN (1, 2) ORDER BY submitted_at, number"
            ).fetchall()
            for row in rows:
                with suppress(DecodeError):
                    found.append(self._complete(_workflow(row)))
        return tuple(found)

    def has_news(self) -> bool:
        """Return whether another connection has written since the last call; True for the first call.

        Raises ``StoreTooNew`` if a newer version of distflow has upgraded the store.
        """
        with self._errors():
            before, (self._version,) = self._version, self._db.execute("PRAGMA data_version").fetchone()
            if self._version != before:
                self._check_format()
        return self._version != before

    def has_unfinished(self, excluded: Container[str] = ()) -> bool:
        """Return whether a workflow not in ``excluded`` (uuids) needs the supervisor for more than stopping orphan attempts."""
        with self._errors():
            return any(row[0] not in excluded for row in self._db.execute("SELECT uuid FROM workflows WHERE unfinished = 1"))

    def list(self, search: Search = _ALL, *, count: int = 20, offset: int = 0) -> tuple[WorkflowRecord, ...]:
        """Return at most ``count`` workflows that match, after the first ``offset``, newest first, without their groups."""
        condition, values = where(search)
        with self._errors():
            rows = self._db.execute(
                f"SELECT {_COLUMNS}, {_TAGS} FROM workflows WHERE {condition}"  # noqa: S608  only constants are pasted
                " ORDER BY submitted_at DESC, number DESC LIMIT ? OFFSET ?",
                (*values, count, offset),
            ).fetchall()
            return tuple(_workflow(row) for row in rows)

    def document(self, workflow: str, kind: str) -> str:
        """Return the ``template`` as submitted or the rendered ``spec`` of a workflow (uuid)."""
        if kind not in ("template", "spec"):
            raise ValueError(kind)
        with self._errors():
            row = self._db.execute(f"SELECT {kind} FROM documents WHERE workflow = ?", (workflow,)).fetchone()  # noqa: S608
        return str(row[0])

    def folder(self, workflow: str) -> str | None:
        """Return the base directory of a workflow's (uuid) ``localpath`` entries; ``None`` if it was not recorded."""
        with self._errors():
            row = self._db.execute("SELECT folder FROM documents WHERE workflow = ?", (workflow,)).fetchone()
        return None if row is None else row[0]

    def plan(self, workflow: str) -> Plan:
        """Return the plan of a workflow (uuid)."""
        from distflow.plan.model import Plan  # noqa: PLC0415  code that only reads records does not need it

        with self._errors():
            row = self._db.execute("SELECT plan FROM documents WHERE workflow = ?", (workflow,)).fetchone()
            return decode(row[0], Plan)

    def pool(self, workflow: str) -> Pool:
        """Return the pool of a workflow (uuid) as it was at submission."""
        from distflow.pools.model import Pool  # noqa: PLC0415  code that only reads records does not need it

        with self._errors():
            row = self._db.execute("SELECT pool FROM documents WHERE workflow = ?", (workflow,)).fetchone()
            return decode(row[0], Pool)

    def notify_targets(self, workflow: str) -> tuple[NotifyTarget, ...]:
        """Return the entries of ``notify`` for a workflow (uuid), including those of the configuration and the profile."""
        with self._errors():
            row = self._db.execute("SELECT notify FROM documents WHERE workflow = ?", (workflow,)).fetchone()
            if row is None or row[0] is None:
                return ()
            from distflow.documents.notify import NotifyTarget  # noqa: PLC0415  code that only reads records does not need it

            return decode(row[0], tuple[NotifyTarget, ...])

    def has_notifications(self) -> bool:
        """Return whether notifications must still be sent."""
        with self._errors():
            return self._db.execute("SELECT 1 FROM notices WHERE pending = 1 LIMIT 1").fetchone() is not None

    def notifications(self) -> tuple[Notification, ...]:
        """Return the notifications that must still be sent, oldest first."""
        from distflow.state.notification import Notification  # noqa: PLC0415  only the process that sends them needs it

        with self._errors():
            rows = self._db.execute(
                "SELECT workflow, target, kind, subject, at FROM notices WHERE pending = 1 ORDER BY at, rowid"
            ).fetchall()
            keys = ("workflow", "target", "on", "subject", "at")
            return convert([dict(zip(keys, row, strict=True)) for row in rows], tuple[Notification, ...])

    def retention(self, workflow: str) -> Retention:
        """Return the settings of a workflow's pool that decide how long its files are kept, without decoding the others."""
        with self._errors():
            row = self._db.execute("SELECT pool FROM documents WHERE workflow = ?", (workflow,)).fetchone()
            return decode(row[0], Retention)

    def events(self, workflow: str, *, after: int = 0) -> tuple[EventRecord, ...]:
        """Return the events of a workflow (uuid) with a sequence number above ``after``, in order."""
        from distflow.state.event_details import read_details  # noqa: PLC0415  quick commands read no events

        with self._errors():
            rows = self._db.execute(
                "SELECT sequence, at, kind, text, workflow, grp, task, attempt, code, fields FROM events"
                " WHERE workflow = ? AND sequence > ? ORDER BY sequence",
                (workflow, after),
            ).fetchall()
        return tuple(
            EventRecord(
                sequence=r[0],
                at=r[1],
                details=read_details(code=r[8], fields=r[9], kind=r[2], text=r[3]),
                workflow=r[4],
                group=r[5],
                task=r[6],
                attempt=r[7],
            )
            for r in rows
        )

    def uuids(self, *, are_unfinished: bool = False) -> frozenset[str]:
        """Return the uuid of every workflow, or only of those that a supervisor still has work for."""
        condition = " WHERE unfinished IN (1, 2)" if are_unfinished else ""
        with self._errors():
            return frozenset(row[0] for row in self._db.execute(f"SELECT uuid FROM workflows{condition}"))  # noqa: S608

    def ids(self) -> dict[str, str]:
        """Return the id of every workflow by its uuid."""
        with self._errors():
            return dict(self._db.execute("SELECT uuid, id FROM workflows").fetchall())

    def _number(self, record: WorkflowRecord, keep: bool) -> int:
        row = self._db.execute("SELECT last FROM names WHERE name = ?", (record.name,)).fetchone()
        last = row[0] if row else 0
        is_taken = self._db.execute(
            "SELECT 1 FROM workflows WHERE name = ? AND number = ?", (record.name, record.number)
        ).fetchone()
        number = record.number if keep and not is_taken else last + 1
        self._db.execute("INSERT OR REPLACE INTO names VALUES (?, ?)", (record.name, max(number, last)))
        return int(number)

    def _complete(self, record: WorkflowRecord) -> WorkflowRecord:
        rows = self._db.execute("SELECT record FROM groups WHERE workflow = ? ORDER BY position", (record.uuid,)).fetchall()
        groups = tuple(decode(row[0], GroupRecord) for row in rows)
        row = self._db.execute("SELECT record FROM cancels WHERE workflow = ?", (record.uuid,)).fetchone()
        cancel = decode(row[0], CancelRequest) if row else None
        return replace(record, groups=groups, cancel=cancel)

    def _similar_ids(self, key: str) -> str:
        from distflow.documents.text import most_similar  # noqa: PLC0415  only errors need it

        name, _, number = key.rpartition("-")
        stem = name if name and number.isdigit() else key
        similar = "SELECT id FROM workflows WHERE name = ? OR instr(id, ?) > 0 ORDER BY submitted_at DESC LIMIT 3"
        rows = self._db.execute(similar, (stem, stem)).fetchall()
        if not rows:
            near = most_similar(stem, [row[0] for row in self._db.execute("SELECT name FROM names")])
            rows = self._db.execute(similar, (near, near)).fetchall()
        if rows:
            return "similar ids: " + ", ".join(row[0] for row in rows)
        return "to list all workflows: distflow workflow list"

    def _write_groups(self, record: WorkflowRecord, groups: Sequence[GroupRecord]) -> None:
        self._db.executemany(
            "INSERT INTO groups VALUES (?,?,?) ON CONFLICT (workflow, position) DO UPDATE SET record = excluded.record",
            [(record.uuid, position, encode(group)) for position, group in enumerate(groups)],
        )

    def _write_events(self, events: Iterable[EventRecord]) -> None:
        from distflow.state.event_details import write_fields  # noqa: PLC0415  quick commands write no events

        self._db.executemany(
            "INSERT INTO events (workflow, at, kind, text, grp, task, attempt, code, fields) VALUES (?,?,?,?,?,?,?,?,?)",
            [
                (
                    e.workflow,
                    e.at,
                    e.kind,
                    writable(e.text) if e.code is None else "",
                    e.group,
                    e.task,
                    e.attempt,
                    e.code,
                    None if e.code is None else write_fields(e.details),
                )
                for e in events
            ],
        )

    def _migrate(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        with self._transaction():
            for step in range(self._check_format(), STORE_FORMAT):
                for statement in _MIGRATIONS[step].split(";"):
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {STORE_FORMAT}")

    def _check_format(self) -> int:
        """Return the number of the file's schema. Raises ``StoreTooNew``."""
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version > STORE_FORMAT:
            raise StoreTooNew(
                f"{self.path} was written by a newer distflow (format {version}; this version reads up to {STORE_FORMAT})",
                hint="install that version again, or point DISTFLOW_STATE at another directory",
            )
        return version

    @contextmanager
    def _transaction(self, mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[None]:
        """Isolate the block's writes, or its reads in ``DEFERRED`` mode, from other processes (sqlite.org/isolation.html)."""
        if self.is_read_only and mode == "IMMEDIATE":
            raise opening.state_error(self.path, OSError("it cannot be written"))
        with self._errors():
            self._db.execute("BEGIN " + mode)
            try:
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, DecodeError) as error:
            raise opening.state_error(self.path, error) from error


_WORK, _ORPHANS, _NOTHING = 1, 2, 0


def _work_left(record: WorkflowRecord) -> int:
    """Return the value of the column ``unfinished``: work for a supervisor, only orphan attempts to stop, or nothing."""
    tasks = [task for group in record.groups for task in group.attempts]
    if not (record.state.is_final and all(task.log_complete for task in tasks)):
        return _WORK
    return _ORPHANS if any(task.orphan is not None for task in tasks) else _NOTHING


def _notification_key(notification: Notification) -> tuple[str, int, str, str]:
    return notification.workflow, notification.target, notification.on.value, notification.subject


def _workflow(row: Sequence[object]) -> WorkflowRecord:
    *fields, tags = row
    values = dict(zip(_FIELDS, fields, strict=True))
    values["warnings"] = msgspec.json.decode(str(values["warnings"]))
    values["labels"] = msgspec.json.decode(str(values["labels"]))
    values["tags"] = sorted(str(tags).split(",")) if tags else []
    return convert(values, WorkflowRecord)
