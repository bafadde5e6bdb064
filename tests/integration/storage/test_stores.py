"""The contract of stores, checked on each kind, and transfers between them and local files."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from distflow.documents.urls import StorageUrl, parse_url
from distflow.errors import InputError, StorageError, StorageMissing, StorageRefused, StorageUnreachable
from distflow.shell import Secret
from distflow.storage.base import PART_BYTES, DataStore, Entry, Sink
from distflow.storage.credentials import Credentials
from distflow.storage.failures import Retries, TransferCanceled
from distflow.storage.files import find_sources
from distflow.storage.stores import Access, check_access, open_store
from distflow.storage.transfers import TransferResult, delete, download, find, find_removable, upload
from distflow.testing.s3 import S3Server
from distflow.testing.sshd import Sshd, make_key, missing_sshd

fast_retries = partial(Retries, pauses_s=(0.0, 0.0))


@pytest.fixture(params=["file", "s3", "sftp"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StorageUrl, Path]:
    """An empty URL, and the folder with its data."""
    if request.param == "file":
        return parse_url(f"file://{tmp_path}/store/top"), tmp_path / "store" / "top"
    if request.param == "sftp":
        request.getfixturevalue("sshd")
        return parse_url(f"sftp://store{tmp_path}/store/top"), tmp_path / "store" / "top"
    server: S3Server = request.getfixturevalue("s3")
    bucket = server.bucket(f"b-{tmp_path.name.replace('_', '-').lower()}"[:60].rstrip("-"))
    return parse_url(f"s3://{bucket.name}/top"), bucket / "top"


def tree(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def make(top: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = top / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return top


# -- the contract of stores -------------------------------------------------------------------------------------------


def test_written_objects_are_found_and_read(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = location
    store = open_store(url)
    source = make(tmp_path / "src", a=b"0123456789") / "a"
    progress: list[int] = []
    store.write(url.below("x/ü b#?.bin").key, source, progress.append)
    store.write(url.below("x.y").key, source, progress.append)
    assert sum(progress) == 20
    found = store.find(url.key)
    assert sorted(entry.key for entry in found) == [url.below("x.y").key, url.below("x/ü b#?.bin").key]
    entry = next(one for one in found if one.key.endswith("bin"))
    assert (entry.size, bool(entry.tag), store.stat(entry.key).size) == (10, True, 10)
    assert store.stat(entry.key).tag == entry.tag
    for start, rest in ((0, b"0123456789"), (7, b"789")):
        pieces: list[bytes] = []
        store.read(entry, start, pieces.append)
        assert b"".join(pieces) == rest
    assert [one.key for one in store.find(entry.key)] == [entry.key]


def test_an_empty_url_has_no_objects_and_a_missing_object_is_an_error(location: tuple[StorageUrl, Path]) -> None:
    url, _ = location
    store = open_store(url)
    store.check_writable(url.key)
    assert list(store.find(url.key)) == []
    store.delete(url.below("x").key)
    with pytest.raises(StorageMissing, match="x"):
        store.stat(url.below("x").key)
    with pytest.raises(StorageMissing, match="nothing at"):
        find(store, url)


def test_a_file_in_place_of_a_directory_is_reported(location: tuple[StorageUrl, Path]) -> None:
    url, folder = location
    if url.scheme in ("file", "sftp"):
        make(folder, taken=b"1")
        with pytest.raises(StorageError, match=r"/taken is not a directory"):
            open_store(url).check_writable(url.below("taken/new").key)


def test_errors_of_the_callbacks_are_raised(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    store = open_store(url)
    source = make(tmp_path / "src", a=b"1") / "a"

    def stop(_: object) -> None:
        raise TransferCanceled

    with pytest.raises(TransferCanceled):
        store.write(url.below("new").key, source, stop)
    store.write(url.below("a").key, source, lambda _: None)
    with pytest.raises(TransferCanceled):
        store.read(store.stat(url.below("a").key), 0, stop)
    assert not [path for path in folder.rglob("*") if path.name.endswith("-part")]


# -- transfers --------------------------------------------------------------------------------------------------------


def test_a_folder_is_uploaded_and_downloaded(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    source = make(tmp_path / "src", a=b"A", sub__deep__b=b"B" * 100_000, empty=b"")
    store = open_store(url)
    progress: list[tuple[int, int]] = []
    moved = upload(store, url, find_sources([source]), on_progress=lambda done, total: progress.append((done, total)))
    assert moved == TransferResult(files=3, size=100_001)
    assert progress[0] == (0, 100_001)
    assert progress[-1] == (100_001, 100_001)
    assert tree(folder) == {f"src/{name}": content for name, content in tree(source).items()}
    assert download(store, url.below("src"), tmp_path / "got") == TransferResult(files=3, size=100_001)
    assert tree(tmp_path / "got") == tree(source)
    assert download(store, url.below("src/sub/deep/b"), tmp_path / "one") == TransferResult(files=1, size=100_000)
    assert list(tree(tmp_path / "one")) == ["b"]


def test_regexes_select_the_files_to_upload_download_and_delete(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    source = make(tmp_path / "src", a=b"A", b=b"B", c__a=b"CA")
    store = open_store(url)
    upload(store, url, find_sources([source], "[ab]", contents=True))
    assert sorted(tree(folder)) == ["a", "b"]
    upload(store, url, find_sources([source / "c"], "c/"))
    assert sorted(tree(folder)) == ["a", "b", "c/a"]
    download(store, url, tmp_path / "got", regex=".*a$")
    assert sorted(tree(tmp_path / "got")) == ["a", "c/a"]
    assert delete(store, url, find_removable(store, url, "c/")) == 1
    assert sorted(tree(folder)) == ["a", "b"]


def test_existing_files_are_not_transferred_again(s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.bucket("again")
    source = make(tmp_path / "src", a=b"A", b=b"B")
    url = parse_url("s3://again/top")
    store = open_store(url)
    upload(store, url, find_sources([source], contents=True))
    make(source, b=b"X")  # of the same size
    result = TransferResult(files=2, size=2, skipped=1, skipped_size=1)
    assert upload(store, url, find_sources([source], contents=True)) == result
    assert tree(bucket / "top") == {"a": b"A", "b": b"X"}
    target = make(tmp_path / "got", a=b"A", b=b"?")
    before = (target / "a").stat().st_ino
    assert download(store, url, target, resume=True) == result
    assert (tree(target), (target / "a").stat().st_ino) == ({"a": b"A", "b": b"X"}, before)
    assert download(store, url, target) == TransferResult(files=2, size=2)


@pytest.mark.parametrize(
    ("given", "names"), [("..", ["top/a", "top/in/b"]), ("../in/..", ["top/a", "top/in/b"]), (".", ["in/b"])]
)
def test_an_upload_of_the_parent_directory_writes_only_below_the_url(
    given: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "top" / "in").mkdir(parents=True)
    for name in ("a", "in/b"):
        (tmp_path / "top" / name).write_text(name)
    monkeypatch.chdir(tmp_path / "top" / "in")
    url = parse_url(f"file://{tmp_path}/goal/run")
    upload(open_store(url), url, find_sources([Path(given)]))
    assert sorted(tree(tmp_path / "goal" / "run")) == names
    assert sorted(tree(tmp_path / "goal")) == [f"run/{name}" for name in names]


def test_links_in_the_source_are_followed_and_loops_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "src", a=b"A")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "b").write_bytes(b"B")
    (source / "link").symlink_to(tmp_path / "else")
    assert [one.name for one in find_sources([source], contents=True)] == ["a", "link/b"]
    (source / "circle").symlink_to(source)
    with pytest.raises(StorageError, match="circle leads back"):
        find_sources([source])
    with pytest.raises(StorageError, match="No such file"):
        find_sources([tmp_path / "nothing"])
    with pytest.raises(StorageError, match="would both be uploaded as `b`"):
        find_sources([tmp_path / "else" / "b", make(tmp_path / "more", b=b"") / "b"])


def test_a_downloaded_file_has_the_modification_time_of_its_store(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    make(folder, x=b"X")
    os.utime(folder / "x", (1_600_000_000, 1_600_000_000))
    store = open_store(url)
    download(store, url, tmp_path / "got")
    assert (tmp_path / "got" / "x").stat().st_mtime == store.stat(url.below("x").key).modified


def test_a_file_that_becomes_a_link_is_not_uploaded(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    found = find_sources([make(tmp_path / "src", x=b"X")], contents=True)
    (tmp_path / "secret").write_bytes(b"S")
    (tmp_path / "src" / "x").unlink()
    (tmp_path / "src" / "x").symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError, match="is no longer a regular file"):
        upload(open_store(url), url, found, retries=fast_retries())
    assert not folder.exists() or tree(folder) == {}


def test_a_download_does_not_follow_links_out_of_its_target(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    make(folder, link__a=b"A", b=b"B")
    (tmp_path / "else").mkdir()
    target = tmp_path / "got"
    target.mkdir()
    (target / "link").symlink_to(tmp_path / "else")
    with pytest.raises(StorageError, match=re.escape(f"because {target / 'link'} is a link that leads out")):
        download(open_store(url), url, target)
    assert tree(tmp_path / "else") == {}
    (target / "link").unlink()
    (tmp_path / "victim").write_bytes(b"mine")
    (target / "b").symlink_to(tmp_path / "victim")
    download(open_store(url), url, target)
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert tree(target) == {"b": b"B", "link/a": b"A"}


@pytest.mark.parametrize("location", ["file", "sftp"], indirect=True)
def test_delete_removes_links_but_not_their_targets(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    precious = make(tmp_path / "precious", a=b"A", in__b=b"B")
    make(folder, x=b"X", sub__y=b"Y")
    for name, target in (("dataset", "../../precious"), ("sub/file", "../../../precious/a"), ("broken", "nothing")):
        (folder / name).symlink_to(target)
    store = open_store(url)
    assert delete(store, url, find_removable(store, url)) == 5
    assert tree(precious) == {"a": b"A", "in/b": b"B"}
    assert [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()] == []
    (folder / "link").symlink_to(precious)
    link = url.below("link")
    assert delete(store, link, find_removable(store, link)) == 1
    assert (tree(precious), list(folder.glob("link"))) == ({"a": b"A", "in/b": b"B"}, [])


@pytest.mark.parametrize("location", ["file", "sftp"], indirect=True)
def test_a_directory_that_becomes_a_link_is_not_deleted(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    precious = make(tmp_path / "precious", y=b"mine")
    make(folder, sub__y=b"Y")
    store = open_store(url)
    found = find_removable(store, url)
    (folder / "sub").rename(folder / "moved")
    (folder / "sub").symlink_to(precious)
    with pytest.raises(StorageError, match="has replaced the directory"):
        delete(store, url, found)
    assert tree(precious) == {"y": b"mine"}


def test_a_full_disk_is_reported_and_keeps_no_partial_file(location: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = location
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        make(folder, a=b"A", big=os.urandom(3 << 20))
        with pytest.raises(StorageError, match=r"(?s)(a|big): No space left on device.*free space there"):
            download(open_store(url), url, small)
        assert not [path.name for path in small.iterdir() if path.name != "a"]
    finally:
        subprocess.run(["umount", small], check=True)


# -- errors of S3 -----------------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_and_not_shown(s3: S3Server, tmp_path: Path) -> None:
    s3.bucket("mine")
    url = parse_url("s3://mine/x")
    wrong = Credentials(access_key_id=s3.access_key_id, access_key=Secret("wrong-4711"), override_url=s3.url)
    store = open_store(url, lambda profile: wrong if profile == "s3://mine" else None)
    source = find_sources([make(tmp_path / "src", a=b"A") / "a"])
    for act in (
        lambda: find(store, url), lambda: upload(store, url, source), lambda: store.delete("x/a"),
        lambda: check_access(store, url, Access.READ), lambda: check_access(store, url, Access.WRITE),
    ):  # fmt: skip
        with pytest.raises(StorageRefused, match="s3://mine") as caught:
            act()
        assert "wrong-4711" not in str(caught.value)
    right = Credentials(access_key_id=s3.access_key_id, access_key=Secret(s3.access_key), override_url=s3.url)
    check_access(open_store(url, lambda _: right), url, Access.WRITE)


def test_missing_credentials_are_reported(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    url = parse_url("s3://mine/x")
    with pytest.raises(StorageRefused, match=r"(?s)no usable credentials.*distflow credential set.*AWS_ACCESS_KEY_ID"):
        find(open_store(url), url)


def test_a_missing_bucket_is_reported(s3: S3Server, tmp_path: Path) -> None:
    url = parse_url("s3://no-such-bucket/x")
    store = open_store(url)
    source = find_sources([make(tmp_path / "src", a=b"A") / "a"])
    for act in (
        lambda: find(store, url), lambda: upload(store, url, source), lambda: store.delete("x"),
        lambda: check_access(store, url, Access.READ), lambda: check_access(store, url, Access.DELETE),
    ):  # fmt: skip
        with pytest.raises(StorageMissing, match="no such bucket"):
            act()


def test_a_stopped_server_is_reported_as_unreachable(own_s3: S3Server) -> None:
    own_s3.stop()
    url = parse_url("s3://b/x")
    with pytest.raises(StorageUnreachable, match=r"Could not connect.*tried 3 times"):
        find(open_store(url), url, retries=fast_retries())


class RestartInPause(threading.Event):
    """Starts the server again in the pause before the next attempt."""

    def __init__(self, server: S3Server | Sshd) -> None:
        super().__init__()
        self.server = server
        self.pauses = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses += 1
        self.server.start()
        return False


class RecordingStore:
    """Records the position at which each read begins."""

    def __init__(self, store: DataStore) -> None:
        self.store = store
        self.starts: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        self.starts.append(start)
        self.store.read(entry, start, sink)


def once(act: Callable[[], None]) -> Callable[[int, int], None]:
    """Return a progress callback that calls ``act`` after the first bytes."""
    done: list[bool] = []

    def on_progress(moved: int, _: int) -> None:
        if moved and not done:
            done.append(True)
            act()

    return on_progress


def test_an_interrupted_download_is_resumed(own_s3: S3Server, tmp_path: Path) -> None:
    content = os.urandom(2 * PART_BYTES + 5)
    make(own_s3.bucket("b"), big=content)
    url = parse_url("s3://b/big")
    store = RecordingStore(open_store(url))
    restart = RestartInPause(own_s3)
    retries = Retries(restart)
    moved = download(store, url, tmp_path / "got", retries=retries, on_progress=once(own_s3.stop))  # type: ignore[arg-type]
    assert (moved.files, restart.pauses, store.starts) == (1, 1, [0, PART_BYTES])
    assert tree(tmp_path / "got") == {"big": content}


def test_a_download_continues_an_earlier_one_of_the_same_content(own_s3: S3Server, tmp_path: Path) -> None:
    content = os.urandom(2 * PART_BYTES + 5)
    make(own_s3.bucket("b"), big=content)
    url = parse_url("s3://b/big")
    with pytest.raises(StorageUnreachable):
        download(open_store(url), url, tmp_path / "got", retries=fast_retries(), on_progress=once(own_s3.stop))
    assert "big" not in tree(tmp_path / "got")
    own_s3.start()
    store = RecordingStore(open_store(url))
    download(store, url, tmp_path / "got")  # type: ignore[arg-type]
    assert store.starts == [PART_BYTES]
    assert tree(tmp_path / "got") == {"big": content}
    # If the content of the key has changed, the partial file is not used.
    with pytest.raises(StorageUnreachable):
        download(open_store(url), url, tmp_path / "more", retries=fast_retries(), on_progress=once(own_s3.stop))
    make(own_s3.bucket("b"), big=content[::-1])
    own_s3.start()
    store = RecordingStore(open_store(url))
    download(store, url, tmp_path / "more")  # type: ignore[arg-type]
    assert store.starts == [0]
    assert (tmp_path / "more" / "big").read_bytes() == content[::-1]


def test_an_interrupted_upload_starts_again(own_s3: S3Server, tmp_path: Path) -> None:
    content = os.urandom(5 * PART_BYTES + 5)
    bucket = own_s3.bucket("b")
    url = parse_url("s3://b/top")
    restart = RestartInPause(own_s3)
    source = find_sources([make(tmp_path / "src", big=content)], contents=True)
    moved = upload(open_store(url), url, source, retries=Retries(restart), on_progress=once(own_s3.stop))
    assert (moved.files, restart.pauses) == (1, 1)
    # The killed server has left a temporary file.
    assert {name: data for name, data in tree(bucket).items() if ".rclone" not in name} == {"top/big": content}


class DamagingStore(RecordingStore):
    """Changes a byte in the first read."""

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        first = not self.starts
        super().read(entry, start, (lambda piece: sink(b"?" + piece[1:])) if first else sink)


def test_a_damaged_download_is_fetched_again(s3: S3Server, tmp_path: Path) -> None:
    make(s3.bucket("damage"), a=b"0123")
    url = parse_url("s3://damage/a")
    store = DamagingStore(open_store(url))
    download(store, url, tmp_path / "got", retries=fast_retries())  # type: ignore[arg-type]
    assert (store.starts, tree(tmp_path / "got")) == ([0, 0], {"a": b"0123"})


def test_a_download_can_be_canceled(s3: S3Server, tmp_path: Path) -> None:
    make(s3.bucket("halt"), a=b"0" * 100, b=b"0" * 100)
    url = parse_url("s3://halt")
    retries = fast_retries()
    with pytest.raises(TransferCanceled):
        download(open_store(url), url, tmp_path / "got", retries=retries, at_once=1, on_progress=once(retries.canceled.set))


def test_secrets_of_the_environment_are_masked_too(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-4711")
    # The message for an unknown host names it.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://wrong-4711.invalid")
    url = parse_url("s3://b/x")
    with pytest.raises(StorageUnreachable) as caught:
        find(open_store(url), url, retries=fast_retries())
    assert "********.invalid" in str(caught.value)


def test_a_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"(?s)s3:// needs a driver.*pip install 'distflow-cli\[data\]'"):
        open_store(parse_url("s3://b/x"))


# -- errors of sftp ---------------------------------------------------------------------------------------------------


def test_a_host_whose_key_is_not_known_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    home = Path(os.environ["HOME"])
    known = home / "known"
    known.touch()
    (home / ".ssh" / "config").write_text(sshd.client_stanza(UserKnownHostsFile=str(known)))
    url = parse_url(f"sftp://store{tmp_path}")
    with pytest.raises(StorageRefused, match=r"sftp://store/.*host key") as caught:
        find(open_store(url), url, retries=fast_retries())
    assert caught.value.hint
    assert known.read_text() == ""


def test_a_login_that_the_host_does_not_accept_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    (Path(os.environ["HOME"]) / ".ssh" / "config").write_text(sshd.client_stanza(IdentityFile=str(other)))
    url = parse_url(f"sftp://store{tmp_path}")
    with pytest.raises(StorageRefused, match="sftp://store/"):
        find(open_store(url), url, retries=fast_retries())


def test_a_download_continues_on_a_new_connection(tmp_path: Path) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    content = os.urandom(20 << 20)
    make(tmp_path / "top", big=content)
    with Sshd(tmp_path / "sshd", "127.0.5.2", alias="store") as server:
        folder = Path(os.environ["HOME"]) / ".ssh"
        folder.mkdir(mode=0o700)
        (folder / "config").write_text(server.client_stanza())
        url = parse_url(f"sftp://store{tmp_path}/top")
        store = RecordingStore(open_store(url))
        restart = RestartInPause(server)
        download(store, url, tmp_path / "got", retries=Retries(restart), on_progress=once(server.stop))  # type: ignore[arg-type]
        assert tree(tmp_path / "got") == {"big": content}
        assert (len(store.starts), store.starts[0], store.starts[1] > 0, restart.pauses) == (2, 0, True, 1)
        store.store.close()


def test_many_files_share_one_connection(sshd: Sshd, tmp_path: Path) -> None:
    source = tmp_path / "src"
    for number in range(40):
        make(source, **{f"sub__{number}": bytes([number]) * number})
    url = parse_url(f"sftp://store{tmp_path}/there")
    store = open_store(url)
    logins = sshd.log.read_text().count("Accepted publickey")
    assert upload(store, url, find_sources([source], contents=True)).files == 40
    assert download(store, url, tmp_path / "got").files == 40
    assert sshd.log.read_text().count("Accepted publickey") == logins + 1
    assert tree(tmp_path / "got") == tree(source)
    assert delete(store, url, find_removable(store, url)) == 40
    store.close()


# -- servers with prepared answers ------------------------------------------------------------------------------------


class PreparedServer(ThreadingHTTPServer):
    """Answers GET and HEAD with the result of ``answer`` (status, headers, body), and PUT with 403. Records requests."""

    def __init__(self, answer: Callable[[str, dict[str, str]], tuple[int, dict[str, str], bytes]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.server.requests.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
                status, headers, body = answer(self.path, dict(self.headers))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def do_PUT(self) -> None:
                self.server.requests.append((self.path, self.headers.get("Expect")))  # type: ignore[attr-defined]
                self.send_error(403)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def make_web_server() -> Iterator[Callable[..., PreparedServer]]:
    made: list[tuple[PreparedServer, threading.Thread]] = []

    def make(answer: Callable[[str, dict[str, str]], tuple[int, dict[str, str], bytes]]) -> PreparedServer:
        server = PreparedServer(answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        made.append((server, thread))
        return server

    yield make
    for server, thread in made:
        server.shutdown()
        thread.join()
        server.server_close()


LISTING = """<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated>
<Contents><Key>top/good</Key><Size>1</Size><ETag>"x"</ETag></Contents>
<Contents><Key>{key}</Key><Size>1</Size><ETag>"x"</ETag></Contents></ListBucketResult>"""


def test_an_upload_does_not_wait_for_100_continue(make_web_server: Callable[..., PreparedServer], tmp_path: Path) -> None:
    server = make_web_server(lambda _path, _headers: (404, {}, b""))
    keys = Credentials(access_key_id="id", access_key=Secret("k"), override_url=server.url, addressing_style="path")
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(StorageRefused):
        open_store(parse_url("s3://b/top"), lambda _: keys).write("top/x", tmp_path / "x", lambda _: None)
    assert server.requests == [("/b/top/x", None)]


@pytest.mark.parametrize("key", ["top/../../evil", "top//tmp/evil", "top/a/../../evil"])
def test_a_key_outside_the_url_writes_no_file(key: str, make_web_server: Callable[..., PreparedServer], tmp_path: Path) -> None:
    server = make_web_server(
        lambda path, _: (200, {}, LISTING.format(key=key).encode()) if "list-type" in path else (404, {}, b"")
    )
    keys = Credentials(access_key_id="id", access_key=Secret("k"), override_url=server.url, addressing_style="path")
    url = parse_url("s3://b/top")
    with pytest.raises(StorageError, match="cannot be stored as a file"):
        download(open_store(url, lambda _: keys), url, tmp_path / "deep" / "got")
    assert tree(tmp_path) == {}


def web(content: bytes, *, ranges: bool = True, short: Sequence[int] = ()) -> Callable[..., tuple[int, dict[str, str], bytes]]:
    """Return an answer function for one file. ``short``: the numbers of bytes that the first answers send."""
    cuts = list(short)

    def answer(path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if not path.startswith("/data/a%20b.bin?sig=s3cret"):
            return 404, {}, b""
        start = int(headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in headers and ranges else 0
        body = content[start:]
        size = {"Content-Length": str(len(body)), "ETag": '"1"'}
        return 206 if start else 200, size, body[: cuts.pop(0)] if cuts else body

    return answer


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_from_a_web_server_is_resumed_after_a_break(
    ranges: bool, make_web_server: Callable[..., PreparedServer], tmp_path: Path
) -> None:
    content = os.urandom(10_000)
    # The first answer is for the size, and its body is not read.
    server = make_web_server(web(content, ranges=ranges, short=[10_000, 6_000]))
    url = parse_url(f"{server.url}/data/a b.bin?sig=s3cret")
    assert download(open_store(url), url, tmp_path, retries=fast_retries()) == TransferResult(files=1, size=10_000)
    assert tree(tmp_path) == {"a b.bin": content}
    # The last request checks that the file has not changed.
    assert [value for _, value in server.requests] == [None, None, "bytes=6000-", None]


@pytest.mark.parametrize("character", [" ", "é", "\u2028"])
def test_a_signed_url_is_escaped_and_never_shown(
    character: str, make_web_server: Callable[..., PreparedServer], tmp_path: Path
) -> None:
    server = make_web_server(lambda *_: (403, {}, b""))
    url = parse_url(f"{server.url}/a?sig=s3cret{character}%20+/=&x")
    with pytest.raises(StorageRefused) as caught:
        download(open_store(url), url, tmp_path, retries=fast_retries())
    assert "s3cret" not in str(caught.value)
    assert server.requests[0][0] == f"/a?sig=s3cret{quote(character)}%20+/=&x"


@pytest.mark.parametrize("size", ["many", "-5", "9" * 5000, "5, 5"])
def test_a_web_server_that_reports_no_size_is_refused(make_web_server: Callable[..., PreparedServer], size: str) -> None:
    server = make_web_server(lambda *_: (200, {"Content-Length": size}, b"hello"))
    url = parse_url(f"{server.url}/a")
    with pytest.raises(StorageError, match="does not report the uncompressed size"):
        open_store(url).find(url.key)


def test_errors_of_web_servers_are_distinguished(make_web_server: Callable[..., PreparedServer], tmp_path: Path) -> None:
    codes = {"/a": 403, "/b": 404, "/c": 503, "/d": 400}
    server = make_web_server(lambda path, _: (codes[path.partition("?")[0]], {}, b""))
    kinds = {"a": StorageRefused, "b": StorageMissing, "c": StorageUnreachable, "d": StorageError}
    for name, kind in kinds.items():
        url = parse_url(f"{server.url}/{name}?sig=s3cret")
        with pytest.raises(StorageError) as caught:
            download(open_store(url), url, tmp_path, retries=fast_retries())
        assert type(caught.value) is kind
        assert "s3cret" not in str(caught.value)
    assert len([path for path, _ in server.requests if path.startswith("/c")]) == 3
    url = parse_url(f"{server.url}/a")
    with pytest.raises(InputError, match="can only be read"):
        check_access(open_store(url), url, Access.WRITE)
    with pytest.raises(InputError, match="name one file"):
        open_store(parse_url(f"{server.url}/folder/"))
