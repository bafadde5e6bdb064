"""Files with the secrets of workflows and the key of gangs: permissions, removal, and damage."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from distflow.errors import StateError
from distflow.lifecycle.states import WorkflowState
from distflow.plan.model import Plan
from distflow.pools.model import Pool
from distflow.shell import Secret
from distflow.state.event_details import Message
from distflow.state.record import EventRecord
from distflow.state.secrets import gang_token, read_secrets, sweep_secrets, write_secrets
from distflow.state.store import Store
from distflow.structs import replace
from unit.state.stored import T0, workflow

HOUR = 3600.0


def test_only_the_owner_can_read_stored_secrets(tmp_path: Path) -> None:
    write_secrets(tmp_path, "one", {"TOKEN": Secret("hidden")})
    write_secrets(tmp_path, "two", {})
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    assert stat.S_IMODE((tmp_path / "one.json").stat().st_mode) == 0o600
    assert read_secrets(tmp_path, "one") == {"TOKEN": Secret("hidden")}
    assert read_secrets(tmp_path, "two") == {}


def test_secrets_of_ended_and_never_stored_workflows_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    with Store(tmp_path / "store.sqlite3") as store:
        for number, state in ((1, WorkflowState.RUNNING), (2, WorkflowState.COMPLETED)):
            record = workflow(state=WorkflowState.RUNNING, number=number)
            store.submit(
                record,
                template="",
                spec="",
                plan=Plan(name="digits", pool="lab", groups=()),
                pool=Pool(name="lab", backend="local", nodes=()),
                folder="",
                events=[EventRecord(at=T0, details=Message(kind="submitted", text=""), workflow=record.uuid)],
            )
            if state.is_final:
                store.save([replace(store.find(record.uuid), state=state)], [])
        running, ended = (workflow(number=number).uuid for number in (1, 2))
        for name, age in ((running, 9 * HOUR), (ended, 0.0), ("being-submitted", 0.0), ("never-stored", 2 * HOUR)):
            write_secrets(folder, name, {"TOKEN": Secret("hidden")})
            os.utime(folder / f"{name}.json", (T0 - age, T0 - age))
        key = folder / "gang.key.123"  # its process was killed before it removed the file
        key.write_bytes(b"")
        os.utime(key, (T0 - 2 * HOUR, T0 - 2 * HOUR))
        # A record that this version cannot read may belong to another version, which still needs the secrets.
        store._db.execute("UPDATE workflows SET warnings = '3' WHERE uuid = ?", (running,))
        sweep_secrets(folder, store, T0)
    assert {path.stem for path in folder.iterdir()} == {running, "being-submitted"}


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_damaged_key_is_refused(tmp_path: Path, content: bytes) -> None:
    first = gang_token(tmp_path, "gang")
    assert gang_token(tmp_path, "gang") == first
    assert [path.name for path in tmp_path.iterdir()] == ["gang.key"]
    (tmp_path / "gang.key").write_bytes(content)
    with pytest.raises(StateError, match=r"gang\.key is damaged") as caught:
        gang_token(tmp_path, "gang")
    assert "remove the file" in str(caught.value.hint)


def test_secrets_and_keys_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync, replace_ = os.fsync, os.replace

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    def rename(source: str, target: str) -> None:
        assert os.stat(source).st_ino in synced, target
        replace_(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_secrets(tmp_path, "one", {"TOKEN": Secret("hidden")})
    gang_token(tmp_path, "gang")
    inodes = {path.stat().st_ino for path in tmp_path.iterdir()}
    assert len(inodes) == 2
    assert inodes <= set(synced)
