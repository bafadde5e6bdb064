"""The lock files of leases, and their holders, also if another user writes to them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.backends.machines.connection.shapes import check_answer
from distflow.runtime.guard.control import AttemptHandles
from distflow.runtime.leases import lease_files, node_leases
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import OpError, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PORT = "port-29500.lock"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = lease_files.open_directory(str(tmp_path / "leases"))
    yield fd
    os.close(fd)


def test_reading_a_lock_does_not_prevent_locking_it(directory: int) -> None:
    """`pool list` reads all locks, and a refused port would end the gang that requests it."""
    os.close(lease_files.lock(directory, PORT, {})[0])
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            lease_files.read_held(directory, PORT)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(300):
            fd, _, error = lease_files.lock(directory, PORT, {"user": "me", "attempt": "a", "pid": 1})
            assert fd >= 0, error
            os.close(fd)
    finally:
        is_over.set()
        for reader in readers:
            reader.join()


def test_a_lock_for_reading_is_reported_without_a_holder(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_files, "_LOCK_TRIES", 2)
    os.close(lease_files.lock(directory, PORT, {"user": "ada", "attempt": "w/g/t/0", "pid": 1})[0])
    reader = os.open(PORT, os.O_RDONLY, dir_fd=directory)
    fcntl.flock(reader, fcntl.LOCK_SH)
    found = lease_files.lock(directory, PORT, {"user": "me"})
    assert found == (-1, "", f"{PORT}: other processes lock it for reading; `lslocks` shows which")
    os.close(reader)


def test_the_holder_of_a_lock_is_named(directory: int) -> None:
    holder = {"user": "me", "attempt": f"{'0' * 32}/train/w1/0", "label": "spin-1/w1", "pid": 1}
    fd, _, _ = lease_files.lock(directory, PORT, holder)
    assert lease_files.lock(directory, PORT, {}) == (-1, "spin-1/w1 (me)", "")
    assert lease_files.read_held(directory, PORT) == holder
    os.close(fd)
    assert lease_files.read_held(directory, PORT) is None


HOSTILE = {
    "deep": b"[" * 4000,
    "deep object": b'{"user":' * 500,
    "long number": b'{"user": "eve", "attempt": "a", "pid": 1, "cpus": ' + b"9" * 400 + b"}",
    "infinite": b'{"user": "eve", "attempt": "a", "pid": 1e999, "memory": Infinity}',
    "not UTF-8": b"\xff\xfe{}",
    "not an object": b"[1, 2]",
    "wrong types": b'{"user": {"a": []}, "attempt": [1], "pid": "x", "cpus": "8", "memory": true}',
    "escapes": b'{"user": "\\u001b[2J\\nroot", "attempt": "\\ud800", "pid": -1, "cpus": -5}',
    "cut off": b'{"user": "' + b"x" * 10000,
    "nothing": b"",
}


REAL = (
    b'{"workflow": "6b0d9a50-7c1f-4a4b-9a53-0f6b1d8f5b11", "attempt": "6b0d9a50-7c1f-4a4b-9a53-0f6b1d8f5b11/train/w1/0", '
    b'"user": "ann", "pid": 13578, "since": 1795371331.1, "cpus": 1, "memory": 1073741824}     '
)
"""The content that an agent writes."""
_values: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just([[]]) | st.just("9" * 400)
)
_contents = (
    st.sampled_from([REAL, *HOSTILE.values()])
    | st.binary(max_size=100)
    | st.dictionaries(st.sampled_from([*json.loads(REAL)]), _values).map(lambda record: json.dumps(record).encode())
    | st.tuples(st.integers(0, len(REAL)), st.integers(0, 20), st.binary(max_size=20)).map(
        lambda cut: REAL[: cut[0]] + cut[2] + REAL[cut[0] + cut[1] :]
    )
)


@pytest.mark.parametrize("content", [REAL, *HOSTILE.values()], ids=["real", *HOSTILE])
def test_no_content_of_a_lock_file_raises(content: bytes) -> None:
    use_lock_files_with(content)


@settings(max_examples=60, deadline=None)
@given(_contents)
@example(b'{"pid": false}')
@example(b'{"cpus": 9223372036854775807, "memory": 9223372036854775807}')
def test_no_content_of_a_lock_file_raises_however_it_was_changed(content: bytes) -> None:
    use_lock_files_with(content)


def use_lock_files_with(content: bytes) -> None:
    """Lease, and list holders, while all held lock files have this content."""
    held = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "leases")
        directory = lease_files.open_directory(path)
        for name in ("gpu-0.lock", PORT, "claim-1000-0.lock", "claim-1000-1.lock", f"gpu-{'9' * 200}.lock"):
            held.append(os.open(os.path.join(path, name), os.O_RDWR | os.O_CREAT, 0o666))
            os.write(held[-1], content)
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        try:
            fd, holder, _ = lease_files.lock(directory, "gpu-0.lock", {})
            assert (fd, holder.isprintable(), len(holder) < 600) == (-1, True, True)
            for gpus, port, wanted in ((1, None, {}), (0, 29500, {}), (0, None, {"cpus": (1, 2), "memory": (1, 2)})):
                with contextlib.suppress(OpError):
                    node_leases.take(path, gpus, [0], port, {"user": "me"}, wanted).close()
            holders = node_leases.list_holders(path)
            check_answer("holders", decode_object(encode(holders)))
        finally:
            for fd in [*held, directory]:
                os.close(fd)


@pytest.mark.parametrize(
    ("label", "shown"), [("spin-1/w1", "spin-1/w1"), ("\x1b[2J/w1", ""), ("a" * 500 + "/w1", ""), ([], "")]
)
def test_a_node_reports_the_task_that_holds_its_gpus(directory: int, tmp_path: Path, label: object, shown: str) -> None:
    holder = {"user": "me", "attempt": f"{'0' * 32}/train/w1/0", "label": label, "pid": 1}
    locks = [lease_files.lock(directory, f"gpu-{gpu}.lock", holder)[0] for gpu in range(3)]
    try:
        (found,) = node_leases.list_holders(str(tmp_path / "leases"))["holders"]
        assert (found["label"], found["gpus"]) == (shown, [0, 1, 2])
    finally:
        for lock in locks:
            os.close(lock)


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_the_keeper_repairs_a_lock_file_that_another_user_has_overwritten(
    directory: int, tmp_path: Path, content: bytes
) -> None:
    """All users may write to the file. The keeper writes its holder again when it starts."""
    fd, _, _ = lease_files.lock(directory, PORT, {"user": "me", "attempt": "a", "pid": 1})
    (tmp_path / "leases" / PORT).write_bytes(content)
    holder = {"user": "me", "attempt": "a"}
    fields: dict[str, Any] = dict.fromkeys(AttemptHandles._fields)
    AttemptHandles(**{**fields, "locks": [fd], "holder": holder}).sign_locks(7)
    found = lease_files.read_held(directory, PORT) or {}
    assert (found["user"], found["attempt"], found["pid"]) == ("me", "a", 7)
    os.close(fd)


def test_a_lock_file_that_is_a_hard_link_is_locked_but_not_written_to(directory: int, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    mine.write_text("years of work")
    os.link(mine, tmp_path / "leases" / PORT)
    fd, _, _ = lease_files.lock(directory, PORT, {"user": "me", "attempt": "a", "pid": 1})
    assert fd >= 0
    lease_files.write_holder(fd, {"user": "me"})
    assert lease_files.lock(directory, PORT, {}) == (-1, "an unknown user", "")
    assert mine.read_text() == "years of work"
    os.close(fd)


def test_a_shorter_record_replaces_a_longer_one_completely(directory: int, tmp_path: Path) -> None:
    for name in ("a user with a long name", "me"):
        fd, _, _ = lease_files.lock(directory, PORT, {"user": name})
        assert json.loads((tmp_path / "leases" / PORT).read_text()) == {"user": name}
        os.close(fd)


def test_a_directory_in_which_any_user_may_remove_leases_is_repaired_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.mkdir()
    path.chmod(0o777)
    os.close(lease_files.open_directory(str(path)))
    assert path.stat().st_mode & 0o7777 == 0o1777
    if os.getuid() == 0:
        path.chmod(0o777)
        os.chown(path, 65534, 65534)
        with pytest.raises(OpError, match="has no sticky bit") as caught:
            node_leases.take(str(path), 1, [0], None, {"user": "me"})
        assert f"chmod +t {path}" in caught.value.message
        path.chmod(0o1777)
        node_leases.take(str(path), 1, [0], None, {"user": "me"}).close()
        assert lease_files.foreign_owner(str(path)) in (pwd.getpwuid(65534).pw_name, "65534")
    link = tmp_path / "link"
    link.symlink_to(path)
    os.close(lease_files.open_directory(str(link)))
    tmp_path.chmod(0o1777)
    with pytest.raises(OpError, match="is a link in a directory that all users may write to"):
        lease_files.open_directory(str(link))
    assert lease_files.foreign_owner(str(tmp_path)) == ""
    assert lease_files.foreign_owner(str(tmp_path / "none")) == ""


def test_too_many_files_in_the_lease_directory_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_leases, "_MAX_FILES", 50)
    for number in range(60):
        (tmp_path / f"junk-{number}").touch()
    with pytest.raises(OpError, match="contains more than 50 files") as caught:
        node_leases.take(str(tmp_path), 0, [], None, {"user": "me"}, {"cpus": (1, 4)})
    assert caught.value.kind == "busy"
    monkeypatch.undo()
    node_leases.take(str(tmp_path), 0, [], None, {"user": "me"}, {"cpus": (1, 4)}).close()


def test_shared_locks_of_another_user_end_a_request_with_an_error(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_leases, "_SEARCH_S", 0.05)
    with contextlib.ExitStack() as held:
        for number in range(5):
            name = tmp_path / "leases" / f"claim-{os.getuid()}-{number}.lock"
            file = held.enter_context(name.open("w"))
            fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(
            OpError, match=r"CPUs or memory: claim-\d+-0\.lock: other processes lock it for reading; `lslocks` shows which$"
        ) as caught:
            node_leases.take(str(tmp_path / "leases"), 0, [], None, {"user": "me"}, {"cpus": (1, 4)})
        assert caught.value.kind == "busy"


def test_a_port_in_use_is_named_with_its_holder(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd, _, _ = lease_files.lock(directory, "port-7.lock", {"user": "ada", "attempt": "w/g/t/0", "pid": os.getpid()})
    monkeypatch.setattr(node_leases, "_bind", lambda _: [os.dup(fd)])
    monkeypatch.setattr(node_leases, "_port_of", lambda _: 7)
    with pytest.raises(OpError, match=r"^no free port was found after 200 tries; the last one, port 7, is in use by .*ada"):
        node_leases.take(str(tmp_path / "leases"), 0, [], "any", {})
    os.close(fd)


def test_the_error_names_a_lock_file_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, name: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr(lease_files, "open_lock", refuse)
    last = r"the last one, port \d+, could not be leased: port-\d+\.lock: No space left on device"
    with pytest.raises(OpError, match=rf"^no free port was found after 200 tries; {last}$"):
        node_leases.take(str(tmp_path / "leases"), 0, [], "any", {})
    with pytest.raises(OpError, match=r"^cannot lease port 7: port-7\.lock: No space left on device$"):
        node_leases.take(str(tmp_path / "leases"), 0, [], 7, {})
    with pytest.raises(OpError, match=r"0 of 1 GPUs .* needs 1. Cannot lock gpu-3\.lock: No space left on device$"):
        node_leases.take(str(tmp_path / "leases"), 1, [3], None, {})
    monkeypatch.setattr(node_leases, "open_lock", refuse)
    with pytest.raises(OpError, match=r"^cannot use the lease directory `.*leases`: No space left on device \(claims\.lock\)$"):
        node_leases.take(str(tmp_path / "leases"), 0, [], None, {}, {"cpus": (1, 2)})


def test_only_positive_integers_are_amounts() -> None:
    assert [lease_files.amount_of(one) for one in (3, True, -1, "3", None, 2.5)] == [3, 0, 0, 0, 0, 0]
