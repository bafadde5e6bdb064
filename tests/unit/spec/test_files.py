"""What a spec sends is stored once, by its content."""

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
    files: [{path: /x, localpath: what}]
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
    """Where the spec lies; what it sends is `what` beside it."""
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
    (folder / "what").write_bytes(data)
    one = bundle(folder)
    assert (folder / "blobs" / one.digest).read_bytes() == data
    assert (one.is_tar, one.mode) == (False, 0o600)


def test_an_unchanged_file_is_not_stored_again_and_a_changed_one_is(folder: Path) -> None:
    (folder / "what").write_bytes(b"a" * 100)
    first = bundle(folder)
    inode = (folder / "blobs" / first.digest).stat().st_ino
    assert bundle(folder) == first
    assert (folder / "blobs" / first.digest).stat().st_ino == inode
    (folder / "what").write_bytes(b"b" * 100)
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
    """Bundle what is sent; let the record of it name another blob, and return its digest, which shows that nothing was read."""
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
    """A directory with two files, of which changes are old enough at once."""
    monkeypatch.setattr(unchanged, "_SETTLED_S", -60.0)
    tree = folder / "what"
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
    (tree / "sub" / ".distflow").mkdir()  # a user's directory of this name is no mark
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
    (folder / "what").write_bytes(b"#!" + b"a" * (1 << 20))
    other = _with_record_of_another_blob(folder)
    assert _digest(folder) == other
    assert bundle_files(load_spec(str(folder / "spec.yaml"))[0], folder / "blobs")[0][str(folder / "what")].mode == 0o700
    (folder / "what").write_bytes(b"#!" + b"b" * (1 << 20))
    assert _digest(folder) != other


def test_reading_is_reported_in_bytes_and_what_is_unchanged_is_not(folder: Path, tree: Path) -> None:
    (tree / "large").write_bytes(os.urandom(2_000_000))
    (tree / "link").symlink_to("large")
    spec = load_spec(str(folder / "spec.yaml"))[0]
    seen: list[tuple[int, int]] = []
    bundle_files(spec, folder / "blobs", lambda done, total: seen.append((done, total)))
    size = 2_000_000 + len("one") + len("two") + len("*.log\n")
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    assert len({done for done, _ in seen}) > 4, "within a large file, too"
    again: list[int] = []
    bundle_files(spec, folder / "blobs", lambda done, _: again.append(done))
    assert not again


def test_a_directory_with_other_exclusions_has_a_record_of_its_own(folder: Path, tree: Path) -> None:
    bundle(folder)
    (folder / "spec.yaml").write_text(SPEC.replace("what}", "what, exclude: [sub]}"))
    bundle(folder)
    assert len(list((folder / "blobs").glob("*.seen"))) == 2


@pytest.mark.parametrize(("dense", "text", "is_compressed"), [(8, 0, False), (15, 4, True), (0, 4, True)])
def test_bytes_that_do_not_compress_are_sent_as_they_are(folder: Path, dense: int, text: int, is_compressed: bool) -> None:
    (folder / "what").mkdir()
    for number in range(dense):
        (folder / "what" / f"weights-{number}").write_bytes(os.urandom(300_000))
    for number in range(text):
        (folder / "what" / f"text-{number}").write_bytes(b"some words " * 27_000)
    one = bundle(folder)
    total = sum(path.stat().st_size for path in (folder / "what").iterdir())
    assert (one.size < total) is is_compressed
    assert bundle(folder) == one
    with tarfile.open(folder / "blobs" / one.digest) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            assert file.read() == (folder / "what" / member.name).read_bytes()


def test_nothing_is_recorded_of_files_that_have_just_changed(folder: Path) -> None:
    (folder / "what").mkdir()
    (folder / "what" / "a.py").write_text("one")
    bundle(folder)
    assert not list((folder / "blobs").glob("*.seen"))


def test_a_blob_that_a_power_cut_shortened_is_stored_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for letter in (b"a", b"b"):
        (folder / "what").write_bytes(letter * 100)
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
        (folder / "what").write_bytes(data)
        assert bundle(folder).text == text


def test_a_script_may_be_executed(folder: Path) -> None:
    (folder / "what").write_text("#!/bin/sh\n")
    assert bundle(folder).mode == 0o700


def test_equal_directories_have_one_digest_whatever_their_times(folder: Path) -> None:
    (folder / "what" / "sub").mkdir(parents=True)
    (folder / "what" / "sub" / "a.py").write_text("a")
    (folder / "what" / "b.log").write_text("b")
    first = bundle(folder)
    assert first.is_tar
    os.utime(folder / "what" / "sub" / "a.py", (0, 0))
    assert bundle(folder) == first
    (folder / "what" / ".gitignore").write_text("*.log\n")
    without = bundle(folder)
    (folder / "what" / "b.log").write_text("changed, and ignored")
    assert bundle(folder) == without != first


def test_both_names_of_one_file_are_sent(folder: Path) -> None:
    (folder / "what" / "sub").mkdir(parents=True)
    (folder / "what" / "first").write_text("data")
    os.link(folder / "what" / "first", folder / "what" / "sub" / "second")
    one = bundle(folder)
    with tarfile.open(folder / "blobs" / one.digest) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        assert {name: file.read() for name, file in files.items() if file} == {"first": b"data", "sub/second": b"data"}


def test_pipes_and_sockets_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "what").mkdir()
    (folder / "what" / "data").write_text("data")
    os.mkfifo(folder / "what" / "pipe")
    monkeypatch.chdir(folder / "what")  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        with tarfile.open(folder / "blobs" / bundle(folder).digest) as archive:
            assert archive.getnames() == ["data"]


@pytest.mark.parametrize("line", ["!", "a\\", "[z-a]"])
def test_a_gitignore_with_a_line_that_means_nothing_holds_for_the_rest(folder: Path, line: str) -> None:
    (folder / "what").mkdir()
    for name in ("a.py", "b.log"):
        (folder / "what" / name).write_text(name)
    (folder / "what" / ".gitignore").write_text(f"{line}\n*.log\n")
    with tarfile.open(folder / "blobs" / bundle(folder).digest) as archive:
        assert archive.getnames() == [".gitignore", "a.py"]


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_file_that_is_too_large_is_an_error_and_leaves_no_part(folder: Path, is_directory: bool) -> None:
    path = folder / "what" / "big" if is_directory else folder / "what"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(5_000_000))
    with file_size_limit(), pytest.raises(StateError, match=r"cannot copy .*what` to .*blobs`: File too large"):
        bundle(folder)
    assert list((folder / "blobs").iterdir()) == []


def test_blobs_that_cannot_be_written_are_errors_of_the_state(folder: Path) -> None:
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
    (folder / "what").mkdir()
    large = folder / "what" / "log"
    large.write_bytes(os.urandom(5_000_000))
    spec, _ = load_spec(str(folder / "spec.yaml"))
    bundles, (problem,) = bundle_files(spec, folder / "blobs", lambda *_: os.truncate(large, 0))
    assert bundles == {}
    assert f"`{large}` became shorter while it was read" in problem.message
    assert problem.where.line == 7
    assert list((folder / "blobs").iterdir()) == []


def test_a_blob_that_is_removed_while_sizes_are_read_does_no_harm(folder: Path) -> None:
    (folder / "what").write_bytes(b"a" * 100)
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
"""An interpreter that knows nothing of distflow."""


def unpacked(folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(library_archive())) as archive:
        for entry in archive:  # Python before 3.11.4 cannot be asked for a filter in `extractall`
            content = archive.extractfile(entry)
            assert content is not None
            (folder / entry.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / entry.name).write_bytes(content.read())
    return folder


def python(interpreter: str, folder: Path, text: str, *, path: str = "") -> str:
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


def test_a_bare_interpreter_can_import_it(tmp_path: Path) -> None:
    text = "import distflow; from distflow import distributed; print(distflow.__version__, distributed.is_distributed_task())"
    assert python(BARE, unpacked(tmp_path), text) == f"{__version__} False"


def test_an_installed_distflow_is_found_after_the_archive(tmp_path: Path) -> None:
    installed = Path(__file__).parents[3] / "src"
    folder = unpacked(tmp_path / "lib")
    text = "import distflow.errors, distflow.train.heartbeat as d; print(distflow.errors.__file__); print(d.__file__)"
    errors, train = python(BARE, folder, text, path=str(installed)).splitlines()
    assert Path(errors) == installed / "distflow" / "errors.py"
    assert Path(train) == folder / "distflow" / "train" / "heartbeat.py"


@pytest.mark.parametrize(("name", "target"), [("data", "/etc"), ("sub/data", "../../elsewhere"), ("sub/data", "..")])
def test_a_link_out_of_a_directory_is_refused_before_the_start(folder: Path, tree: Path, name: str, target: str) -> None:
    (tree / name).symlink_to(target)
    if target == "..":  # the directory itself
        bundle(folder)
        return
    _, (problem,) = bundle_files(load_spec(str(folder / "spec.yaml"))[0], folder / "blobs")
    wanted = f"cannot send the link `{tree / name}`: `{target}` is absolute, or outside of the sent directory"
    assert wanted in problem.as_text()
    (tree / ".gitignore").write_text("data\n")
    bundle(folder)
