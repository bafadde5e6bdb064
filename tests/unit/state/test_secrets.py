"""The secrets of workflows: kept for their owner, and forgotten."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from distflow.lifecycle.states import WorkflowState
from distflow.plan.model import Plan
from distflow.pools.model import Pool
from distflow.shell import Secret
from distflow.state.record import Event
from distflow.state.secrets import read_secrets, sweep_secrets, write_secrets
from distflow.state.store import Store
from unit.state.stored import T0, workflow

HOUR = 3600.0


def test_what_is_kept_is_for_its_owner(tmp_path: Path) -> None:
    write_secrets(tmp_path, "one", {"TOKEN": Secret("hidden")})
    write_secrets(tmp_path, "two", {})
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    assert stat.S_IMODE((tmp_path / "one.json").stat().st_mode) == 0o600
    assert read_secrets(tmp_path, "one") == {"TOKEN": Secret("hidden")}
    assert read_secrets(tmp_path, "two") == {}


def test_what_a_killed_supervisor_or_submit_left_is_swept(tmp_path: Path) -> None:
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
                events=[Event(at=T0, kind="submitted", text="", workflow=record.uuid)],
            )
            if state.is_final:
                store.save([replace(store.find(record.uuid), state=state)], [])
        runs, ended = (workflow(number=number).uuid for number in (1, 2))
        for name, age in ((runs, 9 * HOUR), (ended, 0.0), ("being-submitted", 0.0), ("never-stored", 2 * HOUR)):
            write_secrets(folder, name, {"TOKEN": Secret("hidden")})
            os.utime(folder / f"{name}.json", (T0 - age, T0 - age))
        # Another version of distflow may still need them.
        store._db.execute("UPDATE workflows SET warnings = '3' WHERE uuid = ?", (runs,))
        sweep_secrets(folder, store, T0)
    assert {path.stem for path in folder.iterdir()} == {runs, "being-submitted"}
