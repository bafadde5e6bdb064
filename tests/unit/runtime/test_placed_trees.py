"""Files of an ended attempt that the next attempt takes over: only unchanged ones, and never those of a running attempt."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime import processes
from distflow.runtime.files import attempt_files, placed_trees
from distflow.runtime.files.blobs import Part

FILES = {f"d{number % 8}/sub/module_{number}.py": f"# {number}\n" for number in range(200)} | {"train.py": "train\n"}


class Node:
    """The root of a node with one archive."""

    def __init__(self, root: Path) -> None:
        self.root = root
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for parent in sorted({str(parent) for name in FILES for parent in Path(name).parents} - {"."}):
                folder = tarfile.TarInfo(parent)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(folder)
            for name, text in FILES.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        self.digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        part = Part(str(root / "blobs" / self.digest))
        os.write(part.fd, buffer.getvalue())
        part.finish()

    def place(self, name: str, output_link: object = None, **more: object) -> Path:
        """Place the archive for a new attempt, and return its directory of files."""
        directory = self.root / name
        (directory / "work").mkdir(parents=True)  # as a lease does
        file = {"path": "work", "is_tar": True, "blob": self.digest, "reusable": True, **more}
        launch = {"argv": ["true"], "files": [file], "output_link": output_link}
        attempt_files.place(str(self.root), str(directory), launch)
        return directory / str(file["path"])

    def end(self, name: str, *, all_ended: bool | None = True, boot_id: str = "", host: str = "") -> None:
        """Let an attempt end."""
        (self.root / name / "exit.json").write_text(json.dumps({"reason": "exited", "exit_code": 0, "all_ended": all_ended}))
        state = {"boot_id": boot_id or processes.boot_id(), "host": host or os.uname().nodename}
        (self.root / name / "runner.json").write_text(json.dumps(state))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _inodes(work: Path) -> dict[str, int]:
    return {name: (work / name).stat().st_ino for name in FILES if (work / name).exists()}


def _is_complete(work: Path) -> bool:
    """Return whether the directory has exactly the files of the archive."""
    found = {str(path.relative_to(work)): path.read_text() for path in work.rglob("*") if path.is_file()}
    return found == FILES and all(path.stat().st_mode & 0o777 == 0o755 for path in work.rglob("*") if path.is_dir())


def test_unchanged_files_are_moved_to_each_next_attempt(node: Node) -> None:
    inodes = _inodes(node.place("a"))
    for before, after in (("a", "b"), ("b", "c")):
        node.end(before)
        work = node.place(after)
        assert _is_complete(work)
        assert _inodes(work) == inodes
        assert not [path for path in (node.root / before / "work").rglob("*") if path.is_file()]


def test_files_are_not_moved_into_a_used_directory_or_through_a_link(node: Node) -> None:
    old = node.place("a")
    node.end("a")
    (node.root / "b" / "work").mkdir(parents=True)
    (node.root / "b" / "work" / "earlier").touch()
    assert placed_trees.take_over(str(node.root), node.digest, str(node.root / "b" / "work")) is None
    (node.root / "b" / "link").symlink_to(node.root / "b" / "empty")
    (node.root / "b" / "empty").mkdir()
    assert placed_trees.take_over(str(node.root), node.digest, str(node.root / "b" / "link")) is None
    assert _is_complete(old)


def _keep_times(path: Path) -> None:
    """Write other content of the same size, and restore the times."""
    info = path.stat()
    path.write_text("other"[: info.st_size].ljust(info.st_size))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def _replace_by_link(folder: Path, target: Path) -> None:
    folder.rename(target)
    folder.symlink_to(target)


CHANGES: dict[str, Callable[[Path], object]] = {
    "written in place": lambda work: (work / "d1/sub/module_1.py").write_text("mine"),
    "with the same size and times": lambda work: _keep_times(work / "d1/sub/module_1.py"),
    "removed": lambda work: (work / "d1/sub/module_1.py").unlink(),
    "another mode": lambda work: (work / "d1/sub/module_1.py").chmod(0o640),
    "linked": lambda work: os.link(work / "d1/sub/module_1.py", work / "same"),
    "added": lambda work: (work / "d1/sub/__pycache__").mkdir(),
    "a directory of another mode": lambda work: (work / "d1").chmod(0o700),
    "a directory became a link": lambda work: _replace_by_link(work / "d1", work.parent / "elsewhere"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_files_stay_and_are_unpacked_again(node: Node, change: Callable[[Path], object]) -> None:
    work = node.place("a")
    inodes = _inodes(work)
    change(work)
    mine = {path.relative_to(work): path.read_text() for path in work.rglob("*") if path.is_file()}
    node.end("a")
    after = node.place("b")
    assert _is_complete(after)
    reused = [name for name, inode in _inodes(after).items() if inodes[name] == inode]
    assert len(FILES) > len(reused) or change is CHANGES["added"]
    assert len(reused) >= len(FILES) - 25
    kept = {path.relative_to(work): path.read_text() for path in work.rglob("*") if path.is_file()}
    assert kept.items() <= mine.items()
    assert not set(reused) & {str(path) for path in kept}
    # The next attempt takes over the files of the second attempt, and none of the first.
    node.end("b")
    inodes = _inodes(after)
    assert _is_complete(last := node.place("c"))
    assert _inodes(last) == inodes


def test_files_in_use_are_not_taken(node: Node) -> None:
    work = node.place("running")
    assert _inodes(node.place("second")).items().isdisjoint(_inodes(work).items())
    node.end("second")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=node.root / "second/work/d1") as shell:
        inodes = _inodes(node.place("third"))
        assert inodes.items().isdisjoint(_inodes(node.root / "second/work").items())
        shell.communicate()
    assert _is_complete(work)
    assert _is_complete(node.root / "second/work")
    # When no process uses the files, exactly one of two attempts takes them over.
    before = _inodes(node.root / "second/work")
    assert (_inodes(node.place("fourth")), _inodes(node.place("fifth")) == before) == (before, False)


@pytest.mark.parametrize(("path", "output_link"), [("output/base", None), ("work/out/base", "work/out")])
def test_files_in_the_output_are_not_taken(node: Node, path: str, output_link: str | None) -> None:
    """Each attempt keeps its output, from which users fetch files later, even if those files were sent to it."""
    expected = {}
    for name in ("a", "b", "c"):
        assert _is_complete(node.place(name, output_link, path=path))
        node.end(name)
        output = node.root / name / "output"
        found = {str(one.relative_to(output)): one.read_text() for one in output.rglob("*") if one.is_file()}
        assert found
        expected[output] = found
    for output, files in expected.items():
        assert {str(one.relative_to(output)): one.read_text() for one in output.rglob("*") if one.is_file()} == files


def _link_twice(work: Path) -> None:
    (work / "latest").symlink_to("train.py")
    (work.parent / "output/latest").symlink_to(work / "latest")


LINKS: dict[str, Callable[[Path], object]] = {
    "a file": lambda work: (work.parent / "output/config").symlink_to("../work/d1/sub/module_1.py"),
    "a directory": lambda work: (work.parent / "output/code").symlink_to(work),
    "a link": _link_twice,
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_files_to_which_the_output_has_links_are_not_taken(node: Node, link: Callable[[Path], object]) -> None:
    """The output may contain links to files that were sent. It is fetched with the contents of such files."""
    work = node.place("a")
    (work.parent / "output").mkdir()
    link(work)
    output = work.parent / "output"
    files = {path.name: path.read_text() for path in output.rglob("*") if path.is_file()}
    node.end("a")
    assert _is_complete(node.place("b"))
    assert {path.name: path.read_text() for path in output.rglob("*") if path.is_file()} == files
    assert (output / "code/train.py").exists() or link is not LINKS["a directory"]


def test_files_that_may_still_change_are_not_taken(node: Node) -> None:
    uncertain_ends: list[dict[str, Any]] = [
        {"all_ended": False},
        {"all_ended": None},
        {"boot_id": "earlier"},
        {"host": "another"},
    ]
    for number, end in enumerate(uncertain_ends):
        node.place(str(number))
        node.end(str(number), **end)
    work = node.place("used")
    node.end("used")
    with open(work / "train.py", encoding="utf-8"):
        node.place("b")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={"DISTFLOW_ATTEMPT": "used"}) as process:
        node.place("c")
        process.communicate()
    for directory in (work, *(node.root / str(number) / "work" for number in range(len(uncertain_ends)))):
        assert _is_complete(directory)
    inodes = _inodes(work)
    assert _inodes(node.place("d")) == inodes


def test_the_list_of_attempts_stays_short_and_never_prevents_a_start(node: Node) -> None:
    users = node.root / f"blobs/{node.digest}.users"
    node.place("a")
    node.end("a")
    users.write_text("gone\n" * 100 + "a\n" + "gone\n" * 100)
    blocked = [Path(f"{users}.{end}") for end in ("new", f"{os.getpid()}.part")]
    for path in blocked:
        path.mkdir()
    assert _is_complete(node.place("b"))
    assert not [path for path in (node.root / "a/work").rglob("*") if path.is_file()]
    for path in blocked:
        path.rmdir()
    assert _is_complete(node.place("c"))
    assert users.read_text() == "b\nc\n"


@pytest.mark.parametrize("more", [{"reusable": False}, {"only": ".*module"}])
def test_filtered_or_not_reusable_archives_neither_take_nor_leave_files(node: Node, more: dict[str, object]) -> None:
    node.place("a", **more)
    node.end("a")
    assert not (node.root / "a" / placed_trees.FOLDER).exists()
    assert _is_complete(node.place("b"))


def test_a_forged_record_does_not_move_files_from_outside(node: Node, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    info = (outside / "key").stat()
    state = f"{info.st_mode} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_ino}"
    for name, relative in (("a", "../../outside"), ("b", "work")):
        work = node.place(name)
        if relative == "work":
            work.rename(work.parent / "real")
            work.symlink_to(outside)
        (work.parent / placed_trees.FOLDER / node.digest).write_text(f"{relative}\0key\0{state}")
        node.end(name)
    assert _is_complete(node.place("c"))
    assert (outside / "key").read_text() == "secret"
