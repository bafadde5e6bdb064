"""Data that nodes transfer themselves to and from stores, without a relay by the submitter; over every transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT
from distflow.backends.machines.connection.transfers import deliver_from_node, fetch_on_node
from distflow.documents.urls import parse_url
from distflow.errors import StorageError
from distflow.storage.credentials import identity_of
from distflow.storage.failures import TransferCanceled
from distflow.storage.task_data import Delivered, Delivery, InputRequest, RelayRequired
from distflow.testing.s3 import S3Server, missing_rclone
from distflow.testing.waiting import wait_until
from preloaded import write_program

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = [pytest.mark.slow, LOCAL_TRANSPORT]

CANARY = f"canary-{os.urandom(8).hex()}"
Deliver = Callable[..., Delivered]


@pytest.fixture(scope="module")
def canary_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server whose access key is the canary."""
    if why := missing_rclone():
        pytest.skip(why)
    with S3Server(tmp_path_factory.mktemp("s3"), access_key=CANARY) as server:
        yield server


@pytest.fixture
def s3(canary_s3: S3Server) -> Iterator[S3Server]:
    """The server with the empty bucket ``b``."""
    canary_s3.bucket("b")
    yield canary_s3
    canary_s3.reset()


@pytest.fixture
def output(node: NodeUnderTest) -> Path:
    """The output directory of an attempt that has ended."""
    path = node.root / node.attempt() / "output"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def python(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The node's Python. The service is forked from a process that has imported the driver for S3."""
    return str(write_program(tmp_path, tmp_path_factory.getbasetemp(), "storage"))


@pytest.fixture
def deliver(node: NodeUnderTest, output: Path, s3: S3Server, python: str) -> Deliver:
    """Return a function that lets the node deliver the output."""

    def act(
        delivery: Delivery, *, environ: dict[str, str] | None = None, progress: Callable[[int, int], None] = lambda *_: None,
        **environment: str,
    ) -> Delivered:  # fmt: skip
        identity = identity_of(parse_url(delivery.url), None, s3.environment | (environ or {}))
        assert identity is not None
        attempt = output.parent.relative_to(node.root).as_posix()
        return deliver_from_node(
            node.transport, str(node.top), python, attempt, delivery, identity, environment=environment, timeout_s=20,
            progress=progress,
        )  # fmt: skip

    return act


def bucket_contents(s3: S3Server) -> dict[str, bytes]:
    """The files in the bucket."""
    bucket = s3.bucket("b")
    return {str(path.relative_to(bucket)): path.read_bytes() for path in bucket.rglob("*") if path.is_file()}


def test_a_node_delivers_files_and_the_targets_of_links(deliver: Deliver, output: Path, s3: S3Server, tmp_path: Path) -> None:
    (output / "m").mkdir()
    (output / "m" / "a.pt").write_bytes(b"weights")
    (output / "latest").symlink_to(output / "m" / "a.pt")
    (tmp_path / "elsewhere").write_bytes(b"kept elsewhere")
    (output / "outside").symlink_to(tmp_path / "elsewhere")
    with socket.socket(socket.AF_UNIX) as listener:
        at = os.getcwd()
        os.chdir(output)  # a socket's path is short
        listener.bind("sock")
        os.chdir(at)
        done = deliver(Delivery(url="s3://b/x/"))
    assert done == Delivered(label="s3://b/x/", files=3, size=28)
    assert bucket_contents(s3) == {"x/m/a.pt": b"weights", "x/latest": b"weights", "x/outside": b"kept elsewhere"}
    # A repeated delivery changes nothing, and a regex selects files.
    assert deliver(Delivery(url="s3://b/x/")) == done
    assert deliver(Delivery(url="s3://b/y", regex="m/")).files == 1
    assert deliver(Delivery(url="s3://b/z", regex="none")).files == 0


@EVERY_TRANSPORT
def test_a_delivery_uses_the_nodes_proxy_and_the_submitters_credentials(deliver: Deliver, output: Path, s3: S3Server) -> None:
    (output / "a").touch()
    environment = {"AWS_ACCESS_KEY_ID": "theirs", "AWS_PROFILE": "theirs", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    deliver(Delivery(url="s3://b/x"), **environment)
    assert bucket_contents(s3) == {"x/a": b""}
    with pytest.raises(RelayRequired, match="tried 3 times"):
        deliver(Delivery(url="s3://b/x"), http_proxy="http://127.0.0.1:9")


def test_a_repeated_delivery_of_a_dataset_creates_one_version(deliver: Deliver, output: Path, s3: S3Server) -> None:
    (output / "m").mkdir()
    (output / "m" / "a.pt").write_bytes(b"weights")
    order = Delivery(url="s3://b/sets", dataset="model", paths=("m",), upload_id="0123456789abcdef", at=5.0)
    assert [deliver(order).label for _ in range(2)] == ["dataset model:1"] * 2
    assert bucket_contents(s3)["sets/data/model/1/m/a.pt"] == b"weights"
    with pytest.raises(StorageError, match="the output has no `n`"):
        deliver(Delivery(url="s3://b/sets", dataset="model", paths=("n",), upload_id="0123456789abcdee"))


@pytest.mark.parametrize("fault", ["a link outside", "a missing output", "a missing bucket"])
def test_a_delivery_fails_when_a_relay_would_fail_too(fault: str, deliver: Deliver, output: Path) -> None:
    url, message = "s3://b/x", "the link `up` in the task's output points to `/etc`"
    if fault == "a link outside":
        (output / "up").symlink_to("/etc")
    elif fault == "a missing output":
        output.rmdir()
        message = "output` no longer exists"
    else:
        (output / "a").touch()
        url, message = "s3://none/x", "s3://none/x: there is no such bucket"
    with pytest.raises(StorageError, match=message):
        deliver(Delivery(url=url))


@pytest.mark.parametrize("fault", ["refused", "unreachable"])
def test_a_delivery_that_the_node_cannot_make_requires_a_relay_and_shows_no_secret(
    fault: str, deliver: Deliver, output: Path, node: NodeUnderTest, s3: S3Server
) -> None:
    (output / "a").touch()
    other = {"AWS_SECRET_ACCESS_KEY": f"{CANARY}-wrong"} if fault == "refused" else {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    with pytest.raises(RelayRequired, match="refused" if fault == "refused" else "tried 3 times") as caught:
        deliver(Delivery(url="s3://b/x"), environ=other)
    assert CANARY not in str(caught.value)
    assert [path for path in node.root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()] == []


@EVERY_TRANSPORT
def test_a_delivery_writes_no_secret_to_a_file_and_can_be_canceled(
    deliver: Deliver, output: Path, node: NodeUnderTest, s3: S3Server
) -> None:
    (output / "a").write_bytes(b"x" * 100_000)
    s3.freeze()
    results: list[list[str]] = []

    def cancel(done: int, total: int) -> None:
        results.append(sorted(find_canary(node)))
        # Another process of the same user cannot read its memory. For root, this check always passes.
        assert {os.stat(f"/proc/{pid}/mem").st_uid for pid in delivery_processes(node)} == {0}
        raise TransferCanceled

    with pytest.raises(TransferCanceled):
        deliver(Delivery(url="s3://b/x"), progress=cancel)
    s3.thaw()
    # The S3 server of the test has the secret in its arguments.
    assert [[one for one in found if "rclone" not in one] for found in results] == [[]]
    wait_until(lambda: not delivery_processes(node), 20, "the process on the node ends")


@pytest.fixture
def fetch_input(node: NodeUnderTest, output: Path, s3: S3Server, python: str) -> Callable[..., dict[str, bytes]]:
    """Return a function that lets the node fetch an input of the attempt, and returns the files in its directory."""

    def act(source: InputRequest, place: str = "input/0", *, environ: dict[str, str] | None = None) -> dict[str, bytes]:
        identity = identity_of(parse_url(source.url), None, s3.environment | (environ or {}))
        assert identity is not None
        attempt = output.parent.relative_to(node.root).as_posix()
        fetch_on_node(
            node.transport, str(node.top), python, attempt, source, place, identity, environment={}, timeout_s=20,
            progress=lambda *_: None,
        )  # fmt: skip
        top = output.parent / place
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}

    return act


def test_an_input_replaces_other_files_in_its_place(
    fetch_input: Callable[..., dict[str, bytes]], output: Path, s3: S3Server
) -> None:
    bucket = s3.bucket("b")
    (bucket / "in" / "m").mkdir(parents=True)
    (bucket / "in" / "m" / "a.pt").write_bytes(b"weights")
    (bucket / "in" / "log").write_bytes(b"x")
    assert fetch_input(InputRequest(url="s3://b/in")) == {"m/a.pt": b"weights", "log": b"x"}
    assert fetch_input(InputRequest(url="s3://b/in", regex="m/"), "input/1") == {"m/a.pt": b"weights"}
    # A second fetch removes files that are gone from the store. A regex without a match gives an empty directory.
    (bucket / "in" / "log").unlink()
    assert fetch_input(InputRequest(url="s3://b/in")) == {"m/a.pt": b"weights"}
    assert fetch_input(InputRequest(url="s3://b/in", regex="none"), "input/2") == {}
    assert (output.parent / "input" / "2").is_dir()


def test_an_input_from_a_dataset_has_the_requested_version(
    fetch_input: Callable[..., dict[str, bytes]], deliver: Deliver, output: Path
) -> None:
    for number in (b"1", b"2"):
        (output / "a").write_bytes(number)
        deliver(Delivery(url="s3://b/sets", dataset="m", upload_id=f"012345678{number.decode()}"))
    assert fetch_input(InputRequest(url="s3://b/sets", dataset="m:1")) == {"m/a": b"1"}
    assert fetch_input(InputRequest(url="s3://b/sets", dataset="m:2"), "input/1") == {"m/a": b"2"}


def test_an_input_that_cannot_be_fetched_reports_the_reason(
    fetch_input: Callable[..., dict[str, bytes]], output: Path, s3: S3Server, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        fetch_input(InputRequest(url="s3://none/in"))
    assert fetch_input(InputRequest(url="s3://b/in")) == {}
    (s3.bucket("b") / "in").write_bytes(b"x")
    with pytest.raises(RelayRequired, match="refused") as caught:
        fetch_input(InputRequest(url="s3://b/in"), environ={"AWS_SECRET_ACCESS_KEY": f"{CANARY}-wrong"})
    assert CANARY not in str(caught.value)
    with pytest.raises(StorageError, match=r"\.\."):
        fetch_input(InputRequest(url="s3://b/in"), "../elsewhere")
    (output.parent / "trap").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="trap"):
        fetch_input(InputRequest(url="s3://b/in"), "trap/0")
    assert not (tmp_path / "0").exists()


def delivery_processes(node: NodeUnderTest) -> list[str]:
    """The ids of the processes that deliver from the node's root."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text() == "df-data\n":
                found += [entry.name] if os.fsencode(str(node.top)) in (entry / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


def find_canary(node: NodeUnderTest) -> list[str]:
    """Find the canary in files of the node, and in arguments and environments of processes."""
    assert delivery_processes(node)
    found = [str(path) for path in node.root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        for name in ("cmdline", "environ"):
            try:
                content = (entry / name).read_bytes()
            except OSError:
                continue
            found += [f"{entry.name} {name}: {content!r}"] if CANARY.encode() in content else []
    return found
