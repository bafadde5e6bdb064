"""The private directory below a node's root: it protects users' files, runs no other user's files, and supports old roots."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import marshal
import os
import shutil
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from contract.conftest import LOCAL_TRANSPORT, NodeUnderTest, launch_of
from distflow.backends.machines.connection.bootstrap import RUNTIME
from distflow.backends.machines.connection.transfers import fetch_output
from distflow.errors import AgentError, BootstrapFailed
from distflow.protocol.names import Operation
from distflow.runtime.files import attempts
from distflow.runtime.files.root_directory import MARKER, MARKER_TEXT
from distflow.testing.waiting import wait_until

pytestmark = LOCAL_TRANSPORT

OTHER_USER_ID = 65534
FOREIGN_UUID = "0123456789abcdef0123456789abcdef"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")


def snapshot(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def convert_to_old_layout(node: NodeUnderTest) -> None:
    """Move the content of the private directory to where the previous version had it: into the root, without markers."""
    # Copy the runtime, because running processes import from it. The previous version did not store compiled modules.
    shutil.copytree(node.root / "runtime", node.top / "runtime", ignore=shutil.ignore_patterns("distflow.runtime.*"))
    for path in node.root.iterdir():
        if path.name not in (MARKER, "runtime"):
            path.rename(node.top / path.name)
    for marker in node.top.glob(f"*/{MARKER}"):
        if marker.parent != node.root:
            marker.unlink()


def write_user_files(node: NodeUnderTest) -> dict[str, bytes]:
    """Write files of a user into the root, with names that distflow uses or used. Return their contents by name."""
    names = (
        "datasets/train/0/images/a.bin", "checkpoints/run7/epoch1/0/model.pt", "run_1/a/b/0/metrics.json", ".trash/thesis.tex",
        "blobs/model.pt", f"blobs/{'a' * 64}", "images/cat.sif", f"runtime/{'b' * 64}/notes", f"{FOREIGN_UUID}/g/t/0/data.csv",
        f"{FOREIGN_UUID[:-1]}0/a/b/0/runner.json", "runtime/deep.txt",
    )  # fmt: skip
    for name in names:
        path = node.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the content of {name}")
    return {name: (node.top / name).read_bytes() for name in names}


def survey_uuids(node: NodeUnderTest) -> list[str]:
    return [one["uuid"] for one in node.connect().request("survey")["workflows"]]


def test_files_of_users_in_the_root_survive_clean_and_uninstall(node: NodeUnderTest) -> None:
    user_files = write_user_files(node)
    link = node.connect()
    node.run(link, ["true"])
    assert survey_uuids(node) == [node.workflow]
    for name in ("datasets", "checkpoints", ".trash", "blobs"):
        with pytest.raises(AgentError, match="is not the uuid of a workflow"):
            link.request("clean", workflow=name, keep_output=False)
    assert link.request("clean", workflow=FOREIGN_UUID, keep_output=False) == {"freed_bytes": 0}
    wait_until(lambda: not link.request("reap", dry_run=True)["settled"])
    wait_until(lambda: "conflict" not in request_outcome(node, "clean", workflow=node.workflow, keep_output=False), 20)
    done = wait_until(lambda: None if "conflict" in (one := request_outcome(node, "uninstall")) else one, 20)
    assert not node.root.exists()
    assert snapshot(node.top) == user_files, done


def request_outcome(node: NodeUnderTest, op: Operation, **fields: Any) -> str:
    """Return the answer as JSON, or the kind of the error."""
    try:
        return json.dumps(node.connect().request(op, **fields))
    except AgentError as error:
        return error.kind


def test_a_directory_named_like_a_workflow_without_a_marker_is_kept(node: NodeUnderTest) -> None:
    foreign_file = node.root / FOREIGN_UUID / "g" / "t" / "0" / "data.csv"
    foreign_file.parent.mkdir(parents=True)
    foreign_file.write_text("1,2,3")
    assert survey_uuids(node) == []
    request_outcome(node, "clean", workflow=FOREIGN_UUID, keep_output=False)
    answer = json.loads(request_outcome(node, "uninstall"))
    assert foreign_file.read_text() == "1,2,3"
    assert f"{node.root / FOREIGN_UUID}: it does not belong to distflow" in answer["left"]


def test_two_first_connections_may_create_the_directory_at_the_same_time(fresh_node: NodeUnderTest) -> None:
    marker = fresh_node.root / MARKER
    marker.unlink()
    # The connection reads this marker until the other connection, which is this thread, has created its files.
    os.mkfifo(marker)

    def create() -> None:
        with marker.open("wb"):
            (fresh_node.root / "runtime").mkdir(mode=0o700)
            complete = fresh_node.root / f"{MARKER}.other"
            complete.write_text(MARKER_TEXT)
            complete.rename(marker)

    other = threading.Thread(target=create)
    other.start()
    fresh_node.connect()
    other.join()


def test_a_foreign_directory_in_place_of_the_private_one_is_refused(fresh_node: NodeUnderTest) -> None:
    (fresh_node.root / MARKER).unlink()
    (fresh_node.root / "thesis.tex").write_text("mine")
    with pytest.raises(BootstrapFailed, match="contains files of other programs") as caught:
        fresh_node.connect()
    assert "`root:`" in caught.value.hint
    assert [path.name for path in fresh_node.root.iterdir()] == ["thesis.tex"]
    (fresh_node.root / MARKER).write_text("something else\n")
    with pytest.raises(BootstrapFailed, match="contains files of other programs"):
        fresh_node.connect()
    (fresh_node.root / "thesis.tex").unlink()
    fresh_node.connect().request("ping")


def test_a_link_in_place_of_the_private_directory_is_not_followed(node: NodeUnderTest, tmp_path: Path) -> None:
    shutil.rmtree(node.root)
    (tmp_path / "precious").mkdir()
    node.root.symlink_to(tmp_path / "precious")
    with pytest.raises(BootstrapFailed, match="is not a directory, but distflow needs one there"):
        node.connect()
    assert list((tmp_path / "precious").iterdir()) == []


@needs_root
@pytest.mark.parametrize("place", ["root", "private", "runtime", "hash"])
def test_nothing_is_imported_from_a_directory_of_another_user(fresh_node: NodeUnderTest, tmp_path: Path, place: str) -> None:
    """Another user created the directory first, writable for all, with another runtime in it."""
    trap = tmp_path / "trap"
    home = fresh_node.root / "runtime" / RUNTIME.digest
    package = home / "distflow" / "runtime"
    package.mkdir(parents=True)
    (home / "distflow" / "__init__.py").write_text(f"open({str(trap)!r}, 'w').close()")
    (package / "agent").mkdir()
    (package / "__init__.py").touch()
    (package / "agent" / "__init__.py").touch()
    (package / "agent" / "server.py").write_text("def serve(*_): pass")
    code = marshal.dumps(compile(f"open({str(trap)!r}, 'w').close()", "distflow", "exec"))
    modules = marshal.dumps({"distflow": (True, code)})
    compiled = home / f"distflow.runtime.agent.server.{importlib.util.MAGIC_NUMBER.hex()}"
    compiled.write_bytes(zlib.crc32(modules).to_bytes(4, "big") + modules)
    directory = {"root": fresh_node.top, "private": fresh_node.root, "runtime": fresh_node.root / "runtime", "hash": home}[
        place
    ]
    os.chown(directory, OTHER_USER_ID, OTHER_USER_ID)
    directory.chmod(0o777)
    if place == "hash":  # the runtime of the other user is replaced
        fresh_node.connect().request("ping")
        assert home.stat().st_uid == os.getuid()
    else:
        with pytest.raises(BootstrapFailed, match="who could replace root's programs there") as caught:
            fresh_node.connect()
        assert str(directory) in caught.value.detail
        assert "`root:`" in caught.value.hint
    assert not trap.exists()


@pytest.mark.parametrize("place", ["above", "root", "private"])
def test_a_directory_that_others_may_write_to_is_refused(node: NodeUnderTest, place: str) -> None:
    directory = {"above": node.top.parent, "root": node.top, "private": node.root}[place]
    directory.chmod(0o777)
    with pytest.raises(BootstrapFailed, match="is writable by other users") as caught:
        node.connect()
    assert f"chmod go-w {directory}" in caught.value.hint
    node.top.parent.chmod(0o1777)  # as /tmp and /scratch are
    node.top.chmod(0o1777)
    node.root.chmod(0o755)
    node.connect().request("ping")


@pytest.mark.parametrize("damage", ["missing", "changed", "truncated", "added", "half removed"])
def test_a_damaged_runtime_is_repaired(node: NodeUnderTest, damage: str) -> None:
    node.connect().request("ping")
    home = node.root / "runtime" / RUNTIME.digest
    package = home / "distflow" / "runtime"
    good = {path.relative_to(package) for path in package.rglob("*.py")}
    (compiled,) = home.glob("distflow.runtime.agent.server.*")
    compiled.write_bytes(compiled.read_bytes()[:-1])
    if damage == "missing":
        (package / "wire.py").unlink()
    elif damage == "changed":
        (package / "wire.py").write_text("raise SystemExit('changed')")
    elif damage == "truncated":
        (package / "agent" / "server.py").write_bytes(b"")
    elif damage == "added":
        (package / "json.py").touch()
    else:
        shutil.rmtree(package)
    assert node.run(node.connect(), ["echo", "hi"])[1] == "hi\n"
    assert {path.relative_to(package) for path in package.rglob("*.py")} == good
    assert [path.name for path in (node.root / "runtime").iterdir()] == [RUNTIME.digest]


def test_a_module_that_is_damaged_after_its_check_is_not_imported(node: NodeUnderTest) -> None:
    """Later starts read the modules of the agent from one file, and check the others when they are imported."""
    assert survey_uuids(node) == []
    home = node.root / "runtime" / RUNTIME.digest
    changed = home / "distflow" / "runtime" / "cleanup" / "cleaning.py"
    good = changed.read_bytes()
    changed.write_text("raise SystemExit('changed')")
    with pytest.raises(AgentError, match=f"files below {home} are damaged"):
        node.connect().request("survey")
    assert survey_uuids(node) == []
    assert changed.read_bytes() == good


def test_an_agent_starts_although_its_compiled_modules_cannot_be_stored(node: NodeUnderTest) -> None:
    node.connect().request("ping")
    home = node.root / "runtime" / RUNTIME.digest
    (compiled,) = home.glob("distflow.runtime.agent.server.*")
    compiled.unlink()
    compiled.mkdir()
    node.connect().request("ping")
    assert {path.name for path in home.iterdir()} == {"distflow", compiled.name}


def test_a_task_does_not_change_the_runtime(node: NodeUnderTest) -> None:
    """If the task added files to the runtime, the next connection would replace it."""
    node.run(node.connect(), ["true"])
    home = node.root / "runtime" / RUNTIME.digest
    first = home.stat().st_ino
    node.run(node.connect(), ["true"])
    assert home.stat().st_ino == first


def test_running_attempts_survive_a_change_of_version(node: NodeUnderTest) -> None:
    """Directories of the previous version stay where they are. New attempts of the same workflow use the private directory."""
    blob = node.stage(b"kept")
    node.run(node.connect(), ["true"])
    convert_to_old_layout(node)
    user_files = write_user_files(node)
    attempt, old = f"{node.workflow}/g/running/0", node.top / f"{node.workflow}/g/running/0"
    runner = attempts.create(str(node.top), {"attempt": attempt, "start_timeout_s": 60}, 0o22)
    (node.top / node.workflow / MARKER).unlink()
    wait_until(lambda: (old / "runner.json").read_bytes().strip(b"\0 "), 20, "the pair")
    link = node.connect()
    script = 'while ! test -e "$0"; do sleep 0.2; done; pwd; echo result > ../output/out; exit 3'
    link.request("prepare", attempt=attempt, launch=launch_of(["sh", "-c", script, str(node.top / "go")]))
    link.request("start", attempt=attempt)
    link.close()
    link = node.connect()
    status = link.request("hello", watch=[attempt])["attempts"][attempt]
    assert (status["phase"], status["directory"]) == ("running", str(old))
    # Neither reap nor clean nor uninstall touches it.
    assert [one for one in link.request("reap", dry_run=True)["processes"] if one["attempt"] == attempt] == []
    with pytest.raises(AgentError, match="still running"):
        link.request("clean", workflow=node.workflow, keep_output=False)
    with pytest.raises(AgentError, match="tasks may be running on this node"):
        link.request("uninstall")
    assert link.request("stage", blobs=[{"hash": blob, "size": 4}])["missing"] == []
    (node.top / "go").touch()
    assert node.await_end(attempt)["exit_code"] == 3
    link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    os.waitpid(runner, 0)
    assert link.request("hello", watch=[attempt])["attempts"][attempt]["end"]["exit_code"] == 3
    assert (old / "output.log").read_text() == f"{old}/work\n"
    fetched = fetch_output(node.transport, str(node.top), sys.executable, attempt, node.top.parent, timeout_s=60)
    assert fetched.files == 1
    with pytest.raises(AgentError, match="has already ended on this node"):
        node.lease(link, attempt)
    following = f"{attempt[:-1]}1"
    node.lease(link, following)
    assert (node.root / following).is_dir()
    link.request("stop", attempt=following, grace_s=0, why="")
    node.await_end(following)
    assert survey_uuids(node) == [node.workflow]
    known = link.request("recall", known=[])["workflows"]
    assert [(one["uuid"], sorted(a["directory"] for a in one["attempts"])) for one in known] == [
        (node.workflow, sorted([str(node.root / following), str(old), str(node.top / node.workflow / "g/t1/0")]))
    ]
    wait_until(lambda: "conflict" not in request_outcome(node, "clean", workflow=node.workflow, keep_output=False), 20)
    assert not (node.top / node.workflow).exists()
    assert not (node.root / node.workflow).exists()
    (node.top / "go").unlink()
    assert {name: (node.top / name).read_bytes() for name in user_files} == user_files


def test_uninstall_removes_only_provably_own_files_of_an_earlier_version(node: NodeUnderTest) -> None:
    link = node.connect()
    node.run(link, ["true"])
    blob = node.stage(b"a blob of the previous version")
    (node.root / "blobs" / f"{'c' * 64}").write_bytes(b"without a mark")
    wait_until(lambda: not link.request("reap", dry_run=True)["settled"])
    link.close()
    convert_to_old_layout(node)
    before = node.top / "blobs" / blob
    assert before.exists()
    answer = wait_until(lambda: None if "conflict" in (one := request_outcome(node, "uninstall")) else json.loads(one), 20)
    assert not node.root.exists()
    assert not (node.top / node.workflow).exists()
    assert not (node.top / "runtime").exists()
    assert list(snapshot(node.top)) == [f"blobs/{'c' * 64}"]
    assert answer["left"] == [
        f"{node.top}/blobs: an earlier version of distflow may have created it; check it, and remove it by hand"
    ]


def test_a_users_copy_of_a_workflow_is_not_cleaned(node: NodeUnderTest) -> None:
    node.run(node.connect(), ["true"])
    shutil.copytree(node.root / node.workflow, node.top / node.workflow, ignore=shutil.ignore_patterns("control"))
    copied = snapshot(node.top / node.workflow)
    wait_until(lambda: "conflict" not in request_outcome(node, "clean", workflow=node.workflow, keep_output=False), 20)
    assert not (node.root / node.workflow).exists()
    assert snapshot(node.top / node.workflow) == copied


def test_the_age_of_a_workflow_is_measured_by_the_clock_of_its_file_system(node: NodeUnderTest) -> None:
    node.run(node.connect(), ["true"])
    answer = node.connect().request("survey")
    (one,) = answer["workflows"]
    assert 0 <= answer["now"] - one["modified_at"] < 60
    assert abs(answer["now"] - (node.root / MARKER).stat().st_mtime) < 60


def test_the_digest_covers_names_and_contents() -> None:
    total = hashlib.blake2b(digest_size=32)
    for name, data in RUNTIME._sources.items():
        total.update(f"{name} {len(data)}\n".encode() + data)
    assert RUNTIME.digest == total.hexdigest()
