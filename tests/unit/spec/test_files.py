"""The files and directories that a spec sends: each content is stored once, as a blob."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distflow import __version__
from distflow.errors import StateError
from distflow.runtime.files.root_directory import PRIVATE, mark
from distflow.spec import unchanged
from distflow.spec.files import LIBRARY, RESULTS_MARKER, Bundle, bundle_files, library_archive
from distflow.spec.parse import load_spec
from distflow.state.directory import StateDirectory

SPEC = """
workflow:
  name: send
  tasks:
  - name: one
    command: ["true"]
    files: [{path: /x, localpath: payload}]
"""
TRAIN = "workflow: {name: w, tasks: [{name: t, launcher: LAUNCHER, command: [python3, train.py]}]}"


@contextmanager
def file_size_limit(size: int = 1 << 20) -> Iterator[None]:
    """Limit the size of files that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of the spec, which sends the file or directory ``payload`` of this directory."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def bundle(folder: Path) -> Bundle:
    spec, _ = load_spec(str(folder / "spec.yaml"))
    bundles, problems = bundle_files(spec, folder / "blobs")
    assert problems == ()
    (one,) = bundles.values()
    stored = (folder / "blobs" / one.digest).read_bytes()
    assert (hashlib.sha256(stored).hexdigest(), len(stored)) == (one.digest, one.size)
    return one


@pytest.mark.parametrize("size", [0, 5, (1 << 20) + 1, 5_000_000])
def test_a_file_is_stored_by_its_content(folder: Path, size: int) -> None:
    data = os.urandom(size)
    (folder / "payload").write_bytes(data)
    one = bundle(folder)
    assert (folder / "blobs" / one.digest).read_bytes() == data
    assert (one.is_tar, one.mode) == (False, 0o600)


def test_an_unchanged_file_is_not_stored_again_and_a_changed_one_is(folder: Path) -> None:
    (folder / "payload").write_bytes(b"a" * 100)
    first = bundle(folder)
    inode = (folder / "blobs" / first.digest).stat().st_ino
    assert bundle(folder) == first
    assert (folder / "blobs" / first.digest).stat().st_ino == inode
    (folder / "payload").write_bytes(b"b" * 100)
    assert bundle(folder).digest != first.digest
    assert len(list((folder / "blobs").iterdir())) == 2


def test_each_task_gets_its_own_base64_contents_at_the_same_path(folder: Path) -> None:
    task = '{{name: {0}, command: ["true"], files: [{{path: x, contents: {1}, base64: true}}]}}'
    (folder / "spec.yaml").write_text(
        f"workflow: {{name: send, tasks: [{task.format('a', 'AAEC')}, {task.format('b', 'AAED')}]}}"
    )
    spec, _ = load_spec(str(folder / "spec.yaml"))
    bundles, _ = bundle_files(spec, folder / "blobs")
    sent = [bundles[task.files[0].bundle].digest for group in spec.groups for task in group.tasks]
    assert [(folder / "blobs" / digest).read_bytes() for digest in sent] == [b"\0\1\2", b"\0\1\3"]


def _with_record_of_another_blob(folder: Path) -> str:
    """Bundle the payload, let its record name another blob, and return the digest of that blob.

    If a later bundle has this digest, the payload was not read again.
    """
    bundle(folder)
    (record,) = (folder / "blobs").glob("*.seen")
    other = "0" * 64
    (folder / "blobs" / other).write_bytes(b"other")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"digest": other, "size": 5}))
    return other


def _digest(folder: Path) -> str:
    (one,) = bundle_files(load_spec(str(folder / "spec.yaml"))[0], folder / "blobs")[0].values()
    return one.digest


@pytest.fixture
def tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two files, whose changes count as old enough for a record at once."""
    monkeypatch.setattr(unchanged, "_SETTLED_S", -60.0)
    tree = folder / "payload"
    (tree / "sub").mkdir(parents=True)
    (tree / "a.py").write_text("one")
    (tree / "sub" / "b.py").write_text("two")
    (tree / ".gitignore").write_text("*.log\n")
    return tree


def test_directories_of_distflow_itself_are_not_sent(tree: Path, folder: Path) -> None:
    before = _names(folder)
    state, root = StateDirectory(tree / "state"), tree / "root" / PRIVATE
    for directory in (state.path, root, tree / "results"):
        directory.mkdir(parents=True)
        (directory / "secret").write_text("hunter2")
    state.store.touch()
    mark(str(root))
    (tree / "results" / RESULTS_MARKER).touch()
    (tree / "root" / "own.py").touch()
    (tree / "root" / "distflow-job-7.log").touch()
    (tree / "sub" / ".distflow").mkdir()  # a user's directory of this name is sent
    assert _names(folder) == sorted([*before, "root", "root/own.py", "sub/.distflow"])


def _names(folder: Path) -> list[str]:
    with tarfile.open(folder / "blobs" / bundle(folder).digest) as archive:
        return sorted(archive.getnames())


def _rewritten(tree: Path) -> None:
    before = (tree / "a.py").stat()
    (tree / "a.py").write_text("uno")  # the same size
    os.utime(tree / "a.py", ns=(before.st_atime_ns, before.st_mtime_ns))


def _swapped(tree: Path) -> None:
    (tree / "a.py").rename(tree / "c.py")
    (tree / "sub" / "b.py").rename(tree / "a.py")


@pytest.mark.parametrize(
    "change",
    [
        _rewritten,
        _swapped,
        lambda tree: (tree / "a.py").chmod(0o755),
        lambda tree: (tree / "sub").chmod(0o500),
        lambda tree: (tree / "a.py").unlink(),
        lambda tree: (tree / "new").touch(),
        lambda tree: (tree / "empty").mkdir(),
        lambda tree: (tree / ".gitignore").write_text("*.py\n"),
        lambda tree: next((tree.parent / "blobs").glob("*.seen")).write_text("{"),
        lambda tree: next((tree.parent / "blobs").glob("*.seen")).write_text('{"state": 1, "digest": "../x", "size": "y"}'),
        lambda tree: (tree.parent / "blobs" / ("0" * 64)).unlink(),
        lambda tree: (tree.parent / "blobs" / ("0" * 64)).write_text("shortened"),
    ],
)
def test_a_directory_is_read_again_after_any_change_and_only_then(
    folder: Path, tree: Path, change: Callable[[Path], object]
) -> None:
    other = _with_record_of_another_blob(folder)
    (tree / "ignored.log").touch()
    assert _digest(folder) == other
    change(tree)
    assert _digest(folder) != other
    assert bundle(folder) == bundle(folder)


def test_a_large_file_is_read_again_after_any_change_and_only_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "_SETTLED_S", -60.0)
    (folder / "payload").write_bytes(b"#!" + b"a" * (1 << 20))
    other = _with_record_of_another_blob(folder)
    assert _digest(folder) == other
    assert bundle_files(load_spec(str(folder / "spec.yaml"))[0], folder / "blobs")[0][str(folder / "payload")].mode == 0o700
    (folder / "payload").write_bytes(b"#!" + b"b" * (1 << 20))
    assert _digest(folder) != other


def test_progress_is_reported_in_bytes_but_not_for_unchanged_files(folder: Path, tree: Path) -> None:
    (tree / "large").write_bytes(os.urandom(2_000_000))
    (tree / "link").symlink_to("large")
    spec = load_spec(str(folder / "spec.yaml"))[0]
    reports: list[tuple[int, int]] = []
    bundle_files(spec, folder / "blobs", lambda done, total: reports.append((done, total)))
    size = 2_000_000 + len("one") + len("two") + len("*.log\n")
    assert reports[-1] == (size, size)
    assert reports == sorted(reports)
    assert len({done for done, _ in reports}) > 4, "progress is also reported within a large file"
    second_reports: list[int] = []
    bundle_files(spec, folder / "blobs", lambda done, _: second_reports.append(done))
    assert not second_reports


def test_a_directory_with_other_exclusions_has_a_separate_record(folder: Path, tree: Path) -> None:
    bundle(folder)
    (folder / "spec.yaml").write_text(SPEC.replace("payload}", "payload, exclude: [sub]}"))
    bundle(folder)
    assert len(list((folder / "blobs").glob("*.seen"))) == 2


@pytest.mark.parametrize(("dense", "text", "is_compressed"), [(8, 0, False), (15, 4, True), (0, 4, True)])
def test_bytes_that_do_not_compress_are_sent_as_they_are(folder: Path, dense: int, text: int, is_compressed: bool) -> None:
    (folder / "payload").mkdir()
    for number in range(dense):
        (folder / "payload" / f"weights-{number}").write_bytes(os.urandom(300_000))
    for number in range(text):
        (folder / "payload" / f"text-{number}").write_bytes(b"some words " * 27_000)
    one = bundle(folder)
    total = sum(path.stat().st_size for path in (folder / "payload").iterdir())
    assert (one.size < total) is is_compressed
    assert bundle(folder) == one
    with tarfile.open(folder / "blobs" / one.digest) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            assert file.read() == (folder / "payload" / member.name).read_bytes()


def test_files_that_have_just_changed_are_not_recorded(folder: Path) -> None:
    (folder / "payload").mkdir()
    (folder / "payload" / "a.py").write_text("one")
    bundle(folder)
    assert not list((folder / "blobs").glob("*.seen"))


def test_a_blob_that_a_power_cut_shortened_is_stored_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for letter in (b"a", b"b"):
        (folder / "payload").write_bytes(letter * 100)
        digests.append(bundle(folder).digest)
    (folder / "blobs" / digests[1]).write_bytes(b"")
    synced: list[int] = []
    fsync = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    one = bundle(folder)
    assert one.digest == digests[1]
    assert (folder / "blobs" / one.digest).read_bytes() == b"b" * 100
    assert (folder / "blobs" / one.digest).stat().st_ino in synced


def test_text_is_distinguished_from_other_content(folder: Path) -> None:
    for data, text in ((b"{{output}}\n", "{{output}}\n"), (b"\0\1", None), (b"\xff", None), (b"x" * ((1 << 20) + 1), None)):
        (folder / "payload").write_bytes(data)
        assert bundle(folder).text == text


def test_a_script_is_executable(folder: Path) -> None:
    (folder / "payload").write_text("#!/bin/sh\n")
    assert bundle(folder).mode == 0o700


def test_times_and_ignored_files_do_not_change_the_digest_of_a_directory(folder: Path) -> None:
    (folder / "payload" / "sub").mkdir(parents=True)
    (folder / "payload" / "sub" / "a.py").write_text("a")
    (folder / "payload" / "b.log").write_text("b")
    first = bundle(folder)
    assert first.is_tar
    os.utime(folder / "payload" / "sub" / "a.py", (0, 0))
    assert bundle(folder) == first
    (folder / "payload" / ".gitignore").write_text("*.log\n")
    without = bundle(folder)
    (folder / "payload" / "b.log").write_text("changed, and ignored")
    assert bundle(folder) == without != first


def test_both_hard_links_to_a_file_are_sent(folder: Path) -> None:
    (folder / "payload" / "sub").mkdir(parents=True)
    (folder / "payload" / "first").write_text("data")
    os.link(folder / "payload" / "first", folder / "payload" / "sub" / "second")
    one = bundle(folder)
    with tarfile.open(folder / "blobs" / one.digest) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        assert {name: file.read() for name, file in files.items() if file} == {"first": b"data", "sub/second": b"data"}


def test_pipes_and_sockets_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "payload").mkdir()
    (folder / "payload" / "data").write_text("data")
    os.mkfifo(folder / "payload" / "pipe")
    monkeypatch.chdir(folder / "payload")  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        with tarfile.open(folder / "blobs" / bundle(folder).digest) as archive:
            assert archive.getnames() == ["data"]


@pytest.mark.parametrize("line", ["!", "a\\", "[z-a]"])
def test_the_other_lines_of_a_gitignore_with_an_invalid_line_apply(folder: Path, line: str) -> None:
    (folder / "payload").mkdir()
    for name in ("a.py", "b.log"):
        (folder / "payload" / name).write_text(name)
    (folder / "payload" / ".gitignore").write_text(f"{line}\n*.log\n")
    with tarfile.open(folder / "blobs" / bundle(folder).digest) as archive:
        assert archive.getnames() == [".gitignore", "a.py"]


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_file_that_is_too_large_is_an_error_and_leaves_no_partial_blob(folder: Path, is_directory: bool) -> None:
    path = folder / "payload" / "big" if is_directory else folder / "payload"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(5_000_000))
    with file_size_limit(), pytest.raises(StateError, match=r"cannot copy .*payload` to .*blobs`: File too large"):
        bundle(folder)
    assert list((folder / "blobs").iterdir()) == []


def test_blobs_that_cannot_be_written_raise_a_state_error(folder: Path) -> None:
    (folder / "spec.yaml").write_text(TRAIN.replace("LAUNCHER", "spawn"))
    with (
        file_size_limit(1 << 10),
        pytest.raises(StateError, match=r"cannot store the files of the spec in `.*blobs`: File too large"),
    ):
        bundle(folder)
    (folder / "blobs").rmdir()
    (folder / "blobs").touch()
    with pytest.raises(StateError, match=r"cannot store the files of the spec in `.*blobs`: File exists"):
        bundle(folder)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(folder: Path) -> None:
    (folder / "payload").mkdir()
    large = folder / "payload" / "log"
    large.write_bytes(os.urandom(5_000_000))
    spec, _ = load_spec(str(folder / "spec.yaml"))
    bundles, (problem,) = bundle_files(spec, folder / "blobs", lambda *_: os.truncate(large, 0))
    assert bundles == {}
    assert f"`{large}` became shorter while it was read" in problem.message
    assert problem.where.line == 7
    assert list((folder / "blobs").iterdir()) == []


def test_a_blob_that_is_removed_while_sizes_are_read_is_ignored(folder: Path) -> None:
    (folder / "payload").write_bytes(b"a" * 100)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "another.part").symlink_to(folder / "gone")
    assert bundle(folder).size == 100


def test_distflow_train_is_sent_if_a_task_needs_it(folder: Path) -> None:
    for launcher, sent in (("spawn", [LIBRARY]), ("torchrun", [])):
        (folder / "spec.yaml").write_text(TRAIN.replace("LAUNCHER", launcher))
        bundles, problems = bundle_files(load_spec(str(folder / "spec.yaml"))[0], folder / "blobs")
        assert not problems
        assert list(bundles) == sent
    (stored,) = (folder / "blobs").iterdir()
    assert stored.read_bytes() == library_archive()


BARE = str(Path(sys.base_prefix) / "bin" / "python3")
"""An interpreter without an installed distflow."""


def unpack_library(folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(library_archive())) as archive:
        for entry in archive:  # before Python 3.11.4, `extractall` has no argument `filter`
            content = archive.extractfile(entry)
            assert content is not None
            (folder / entry.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / entry.name).write_bytes(content.read())
    return folder


def run_python(interpreter: str, folder: Path, text: str, *, path: str = "") -> str:
    done = subprocess.run(
        [interpreter, "-S", "-c", text], capture_output=True, text=True, check=False, timeout=60, cwd=folder,
        env={"PYTHONPATH": f"{folder}:{path}" if path else str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_archive_is_reproducible_and_has_only_sources() -> None:
    assert library_archive() == library_archive()
    with tarfile.open(fileobj=io.BytesIO(library_archive())) as archive:
        names = archive.getnames()
    assert {"distflow/distributed.py", "distflow/train/heartbeat.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)


def test_a_bare_interpreter_can_import_the_library(tmp_path: Path) -> None:
    text = "import distflow; from distflow import distributed; print(distflow.__version__, distributed.is_distributed_task())"
    assert run_python(BARE, unpack_library(tmp_path), text) == f"{__version__} False"


def test_an_installed_distflow_is_found_after_the_archive(tmp_path: Path) -> None:
    installed = Path(__file__).parents[3] / "src"
    folder = unpack_library(tmp_path / "lib")
    text = "import distflow.errors, distflow.train.heartbeat as d; print(distflow.errors.__file__); print(d.__file__)"
    errors, train = run_python(BARE, folder, text, path=str(installed)).splitlines()
    assert Path(errors) == installed / "distflow" / "errors.py"
    assert Path(train) == folder / "distflow" / "train" / "heartbeat.py"


@pytest.mark.parametrize(("name", "target"), [("data", "/etc"), ("sub/data", "../../elsewhere"), ("sub/data", "..")])
def test_a_link_that_leaves_the_sent_directory_is_refused(folder: Path, tree: Path, name: str, target: str) -> None:
    (tree / name).symlink_to(target)
    if target == "..":  # the directory itself
        bundle(folder)
        return
    _, (problem,) = bundle_files(load_spec(str(folder / "spec.yaml"))[0], folder / "blobs")
    wanted = f"cannot send the link `{tree / name}`: `{target}` is absolute, or outside of the sent directory"
    assert wanted in problem.as_text()
    (tree / ".gitignore").write_text("data\n")
    bundle(folder)
