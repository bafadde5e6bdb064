"""Unpacking archives that a hostile node may have made: nothing outside the directory is written, and no link leads there."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.runtime.files.unpacking import EARLIEST_S, unpack
from distflow.runtime.wire import OpError

Member = tuple[str, str, str]
"""Kind (``file``, ``dir``, ``sym``, ``hard``), name, and content or target."""

_TYPES = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}


def archive_of(members: list[Member]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for kind, name, more in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = _TYPES[kind], 0o700
            if kind == "file":
                member.size = len(more.encode())
                tar.addfile(member, io.BytesIO(more.encode()))
            else:
                member.linkname = more if kind != "dir" else ""
                tar.addfile(member)
    return packed.getvalue()


def below(top: Path) -> list[str]:
    """Return all paths below a directory; ``Path.rglob`` fails at links whose target is too long."""
    return [os.path.join(folder, name) for folder, folders, files in os.walk(top) for name in [*folders, *files]]


def links_outside(top: Path) -> list[str]:
    """Return the links below a directory that lead out of it."""
    return [
        os.path.relpath(path, top)
        for path in below(top)
        if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(top)
    ]  # fmt: skip


LATE_ESCAPE: list[Member] = [
    ("dir", "a/b/c", ""), ("sym", "s", "a/b/c"), ("sym", "l", "s/../../../victim"), ("sym", "s", "a"),
]  # fmt: skip
"""``l`` leads to ``victim`` inside while ``s`` leads three directories down, and outside once it leads one directory down."""

STALE_PARENT: list[Member] = [
    ("dir", "a/b", ""), ("sym", "t", "."), ("sym", "s", "a/b"), ("sym", "l", "s/../.."),
    ("file", "l/first", "1"), ("hard", "s", "t"), ("file", "l/evil", "2"),
]  # fmt: skip
"""``l`` leads to the directory itself until a hard link replaces ``s``, and then to two directories above it."""


@pytest.mark.parametrize("target", ["victim", "victim/deeper"])
def test_a_link_that_leads_outside_because_of_a_later_member_is_refused(tmp_path: Path, target: str) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "victim").write_text("secret")
    members: list[Member] = [
        ("dir", "a/b", ""), ("sym", "s", "a/b"), ("sym", "l", "s/../../" + target), ("sym", "s", "a"),
    ]  # fmt: skip
    with pytest.raises(OpError, match="points outside"):
        unpack(io.BytesIO(archive_of(members)), str(top))
    assert links_outside(top) == []


def test_a_hard_link_that_replaces_a_link_places_no_file_outside(tmp_path: Path) -> None:
    top = tmp_path / "in" / "top"
    top.mkdir(parents=True)
    members: list[Member] = [
        ("dir", "a/b", ""), ("sym", "here", "."), ("sym", "s", "a/b"), ("sym", "l", "s/../.."), ("file", "l/first", "1"),
        ("hard", "s", "here"), ("file", "l/evil", "2"),
    ]  # fmt: skip
    with pytest.raises(OpError, match=r"outside|out of"):
        unpack(io.BytesIO(archive_of(members)), str(top))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_an_archive_of_one_directory_places_nothing_next_to_it(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "train.py").write_text("mine")
    members: list[Member] = [
        ("dir", "ckpt", ""), ("dir", "ckpt/empty", ""), ("file", "ckpt/model.pt", "1"), ("file", "train.py", "evil"),
        ("file", "torch.py", "evil"), ("sym", "ckpt", "."), ("sym", "ckpt/latest", "model.pt"),
        ("sym", "ckpt/data", "../train.py"),
    ]  # fmt: skip
    unpack(io.BytesIO(archive_of(members)), str(top), within="ckpt")
    assert sorted(path.name for path in top.iterdir()) == ["ckpt", "train.py"]
    assert (top / "train.py").read_text() == "mine"
    assert sorted(path.name for path in (top / "ckpt").iterdir()) == ["data", "empty", "latest", "model.pt"]
    escape: list[Member] = [("sym", "ckpt/up", ".."), ("file", "ckpt/up/train.py", "evil")]
    with pytest.raises(OpError, match="leads through a link out"):
        unpack(io.BytesIO(archive_of(escape)), str(top), within="ckpt")
    assert (top / "train.py").read_text() == "mine"


def test_links_that_stay_inside_are_unpacked(tmp_path: Path) -> None:
    top = tmp_path / "top"
    members: list[Member] = [
        ("file", "runs/1/w", "weights"), ("sym", "latest", "runs/1"), ("sym", "best", "latest/w"), ("sym", "later", "runs/2"),
        ("hard", "copy", "runs/1/w"),
    ]  # fmt: skip
    for _ in range(2):
        unpack(io.BytesIO(archive_of(members)), str(top))
    assert ((top / "best").read_text(), (top / "copy").read_text()) == ("weights", "weights")
    assert os.readlink(top / "later") == "runs/2"


@pytest.mark.parametrize(("written", "kept"), [(0.0, EARLIEST_S), (1.6e9, 1.6e9), (float("nan"), EARLIEST_S), (1e300, 2.0**32)])
def test_invalid_times_are_replaced(tmp_path: Path, written: float, kept: float) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("x")
        member.pax_headers = {"mtime": str(written)}
        tar.addfile(member, io.BytesIO(b""))
    unpack(io.BytesIO(packed.getvalue()), str(tmp_path / "top"))
    assert (tmp_path / "top" / "x").stat().st_mtime == kept


def test_a_file_that_claims_to_be_sparse_does_not_fill_the_disk(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("x")
        member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 50), "GNU.sparse.numblocks": "1"}
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(OpError, match="is not an ordinary file, directory or link"):
        unpack(io.BytesIO(packed.getvalue()), str(tmp_path / "top"))


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    with pytest.raises(OpError, match="a header of 1099511627776 bytes"):
        unpack(io.BytesIO(header.tobuf(tarfile.GNU_FORMAT)), str(tmp_path / "top"))


def test_an_endless_sequence_of_long_names_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 4
    one = header.tobuf(tarfile.GNU_FORMAT) + b"abc\0".ljust(512, b"\0")
    with pytest.raises(OpError, match="is damaged"):
        unpack(io.BytesIO(one * 5000), str(tmp_path / "top"))


def test_a_compressed_archive_is_refused_if_none_is_expected(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz"):
        pass
    unpack(io.BytesIO(packed.getvalue()), str(tmp_path / "top"))
    with pytest.raises(OpError, match="is damaged"):
        unpack(io.BytesIO(packed.getvalue()), str(tmp_path / "top"), compressed=False)


# -- random archives ---------------------------------------------------------------------------------------------------

parts = st.sampled_from(["a", "b", "l", "s", "..", ".", "", "é", "x" * 300, "n\0l", "w\n"])
paths = st.lists(parts, min_size=1, max_size=5).map("/".join)
members = st.lists(st.tuples(st.sampled_from(sorted(_TYPES)), paths, paths), max_size=12)


@settings(max_examples=300)
@given(members)
@example(LATE_ESCAPE)
@example(STALE_PARENT)
@example([("sym", "a", "x" * 300)])
def test_no_archive_writes_outside(tmp_path_factory: pytest.TempPathFactory, given_members: list[Member]) -> None:
    around = tmp_path_factory.mktemp("around").resolve()
    top = around / "in" / "top"
    top.mkdir(parents=True)
    (around / "victim").write_text("mine")
    try:
        unpack(io.BytesIO(archive_of(given_members)), str(top))
    except (OpError, OSError):
        pass
    else:
        assert links_outside(top) == []
    assert sorted(str(path.relative_to(around)) for path in map(Path, below(around)) if top not in (path, *path.parents)) == [
        "in", "victim",
    ]  # fmt: skip
    assert (around / "victim").read_text() == "mine"


CORPUS = [
    archive_of([("dir", "d", ""), ("file", "d/x", "1" * 700), ("sym", "l", "d/x"), ("hard", "h", "d/x")]),
    archive_of([("file", "ü" * 100 + "/" + "v" * 200, "long names have extended headers")]),
    archive_of(LATE_ESCAPE),
]
"""Valid archives, which the next test damages."""


@settings(max_examples=200)
@given(
    whole=st.sampled_from(CORPUS),
    changes=st.lists(st.tuples(st.integers(0, 8191), st.integers(0, 255)), max_size=8),
    length=st.integers(0, 10240),
)
def test_a_damaged_archive_is_refused_or_unpacked(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(whole)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    around = tmp_path_factory.mktemp("around").resolve()
    top = around / "in" / "top"
    try:
        unpack(io.BytesIO(bytes(damaged[:length])), str(top))
    except (OpError, OSError):
        return
    assert links_outside(top) == []
    assert not [path for path in map(Path, below(around)) if top not in (path, *path.parents) and path not in top.parents]
