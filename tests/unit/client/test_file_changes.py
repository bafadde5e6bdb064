"""When files that change are copied."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from distflow.client.rsync.file_changes import CopySchedule, take_snapshot


def test_every_kind_of_change_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path)
    seen = take_snapshot(str(tmp_path))
    assert take_snapshot(str(tmp_path)) == seen
    assert {os.path.relpath(path, tmp_path) for path in seen} == {".", "sub", "sub/one", "link"}
    (tmp_path / "sub" / "one").write_text("12")
    grown = take_snapshot(str(tmp_path))
    (tmp_path / "sub" / "one").chmod(0o700)
    runs = take_snapshot(str(tmp_path))
    (tmp_path / "two").write_text("")
    more = take_snapshot(str(tmp_path))
    (tmp_path / "sub" / "one").unlink()
    less = take_snapshot(str(tmp_path))
    steps = [seen, grown, runs, more, less]
    assert all(before != after for before, after in itertools.pairwise(steps))
    assert list(take_snapshot(str(tmp_path / "two"))) == [str(tmp_path / "two")]
    assert take_snapshot(str(tmp_path / "none")) == {}


def test_it_is_copied_at_first_after_a_rest_and_now_and_then() -> None:
    schedule = CopySchedule(debounce_s=3, reconcile_s=100)
    schedule.saw({"file": (0, 0, 0)}, 0)
    assert schedule.is_due(0)
    schedule.copied(0)
    due = []
    for now in range(1, 220):
        # It changes at 10 and 11, and then with every look from 150 on.
        schedule.saw({"file": (0, 0 if now < 10 else 1 if now < 11 else 2 if now < 150 else now, 0)}, now)
        if schedule.is_due(now):
            due.append(now)
            schedule.copied(now)
    # A rest of 3 after the change at 11; 100 after that; then the changes never rest, and 100 after that.
    assert due == [14, 114, 214]
    schedule.forget_copies()
    assert schedule.is_due(214)
