"""Canaries are secrets that a task gets and prints. They must appear only in the files that need them."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from distflow.testing.s3 import S3Server, missing_rclone
from distflow.testing.waiting import wait_until
from preloaded import write_program
from scenarios.conftest import Cli
from scenarios.lab import Lab

ENV, FILE, LINE, SET, AUTH = (f"canary-{name}-{os.urandom(8).hex()}" for name in ("env", "file", "line", "set", "auth"))
CANARIES = tuple(value.encode() for value in (ENV, FILE, LINE, SET, AUTH))
SPEC = """
workflow:
  name: leaky
  tasks:
  - name: talker
    credentials:
      wandb: {WANDB_API_KEY: api_key}
      deploy: /run/secrets/deploy
    environment: {KEYS: /run/secrets/deploy/key}
    command:
    - sh
    - -c
    - |
      echo "keys: $WANDB_API_KEY $SET; $(cat $KEYS)"
      test "$(stat -L -c %a /run/secrets/deploy /run/secrets/deploy/key | tr '\\n' ' ')" = "700 600 " && echo private
      echo ready
      while [ ! -e GO ]; do sleep 0.2; done
      printf '{"message": {"message": "failed with %s", "extraInfo": {}}}' "$SET" > "$TORCHELASTIC_ERROR_FILE"
      printf '%s' "$WANDB_API_KEY" | tee /dev/stderr
      exit 3
"""
WRITER = """
workflow: {name: writer, tasks: [{name: a, command: [sh, -c, 'echo x > {{output}}/x'], outputs: [{url: "s3://b/x"}]}]}
"""
BLOCKER = """
workflow:
  name: first
  resources: {default: {cpu: 64}}
  tasks:
  - name: a
    command: [sh, -c, 'until test -e GO; do sleep 0.2; done']
"""


def set_credential(cli: Cli, name: str, value: str, *, key: str, kind: str = "GENERIC") -> None:
    """Set a credential from standard input."""
    done = cli.run("credential", "set", name, "--type", kind, "--payload-file", f"{key}=-", stdin=value)
    assert done.code == 0, done.err


def has_canary(data: bytes) -> bool:
    return any(canary in data for canary in CANARIES)


def files_with_canary(folders: Iterable[Path]) -> set[Path]:
    """Return the files that contain a canary. Meanwhile, files may be created and removed."""
    found = set()
    for folder in folders:
        for directory, _, names in os.walk(folder):
            for name in names:
                path = Path(directory, name)
                try:
                    if path.is_file() and has_canary(path.read_bytes()):
                        found.add(path)
                except OSError:
                    continue
    return found


def processes_with_canary() -> list[str]:
    """Return the processes of this machine whose arguments contain a canary."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if has_canary(line):
            found.append(f"{entry.name}: {line!r}")
    return found


@pytest.mark.parametrize("where", ["local", pytest.param("lab", marks=pytest.mark.ssh)])
def test_canaries_are_only_in_private_files_and_masked_in_output(cli: Cli, where: str, request: pytest.FixtureRequest) -> None:
    if where == "lab":
        lab: Lab = request.getfixturevalue("lab")
        lab.configure(names=("gpu1",))
    set_credential(cli, "wandb", ENV, key="api_key")
    set_credential(cli, "deploy", f"{FILE}\n{LINE}\n", key="key")
    set_credential(cli, "images", AUTH, key="auth", kind="REGISTRY")
    go = cli.folder / "GO"
    spec = cli.spec(SPEC.replace("GO", str(go)))
    dry = [cli.run("workflow", "submit", spec, "--set-env", f"SET={SET}", "--dry-run", *more) for more in ((), ("-t", "json"))]
    dry += [cli.run("workflow", "submit", spec, "--set-env", f"SET={SET}", "--scripts", str(cli.folder / "scripts"))]
    workflow = cli.submit(spec, "--set-env", f"SET={SET}")
    cli.await_log(workflow, "ready")

    # While the task runs, canaries are in private files of credentials and secrets, in no other file and in no arguments.
    kept = files_with_canary([cli.folder])
    uuid = cli.query(workflow)["uuid"]
    names = {str(path.relative_to(cli.state)) for path in kept}
    assert names == {"credentials/wandb.json", "credentials/deploy.json", "credentials/images.json", f"secrets/{uuid}.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in kept} == {0o700}
    assert not processes_with_canary()
    # The task got all secrets. Its log masks them.
    log = cli.logs(workflow)
    assert log == "[talker] keys: ******** ********; ********\n[talker] private\n[talker] ready\n", log

    go.touch()
    ended = cli.await_status(workflow, "FAILED")
    (task,) = cli.tasks(workflow).values()
    assert task["exit_code"] == 3
    assert "failed with ********" in json.dumps(ended)
    wait_until(lambda: not (cli.state / "secrets" / f"{uuid}.json").exists(), 30)
    assert {path.parent.name for path in files_with_canary([cli.folder])} == {"credentials"}
    assert not files_with_canary([Path(f"/dev/shm/distflow-{os.getuid()}")])
    results = [
        *dry, *(cli.run("workflow", verb, workflow) for verb in ("query", "logs", "events", "spec")),
        cli.run("workflow", "query", workflow, "-v", "-t", "json"), cli.run("workflow", "events", workflow, "-t", "talker"),
        cli.run("workflow", "list", "-t", "json"), cli.run("task", "list", "-t", "json"), cli.run("credential", "list"),
        cli.run("credential", "list", "-t", "json"), cli.run("workflow", "submit", workflow),
    ]  # fmt: skip
    assert not [one for one in results if has_canary((one.out + one.err).encode())]
    # Two adjacent secrets give one mask, or two masks if they arrived separately.
    assert cli.logs(workflow).replace("*" * 16, "*" * 8).endswith("[talker] ready\n[talker] ********\n")


@pytest.mark.parametrize("where", ["local", pytest.param("lab", marks=pytest.mark.ssh)])
def test_a_node_writes_to_a_store_without_exposing_the_secret_key(
    cli: Cli, where: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    if why := missing_rclone():
        pytest.skip(why)
    # The transfer is a fork of a process that has imported the driver for S3.
    cli.python = str(write_program(cli.folder, tmp_path_factory.getbasetemp(), "storage"))
    cli.configure()
    if where == "lab":
        lab: Lab = request.getfixturevalue("lab")
        lab.configure(names=("gpu1",))
    with S3Server(tmp_path_factory.mktemp("s3"), access_key=FILE) as server:
        server.bucket("b")
        _set_store_credential(cli, tmp_path_factory.mktemp("fields"), server.url)
        server.freeze()
        workflow = cli.submit(cli.spec(WRITER))
        wait_until(transfer_pids, 60)
        # During the transfer, only this machine's credential contains the key, and only the server has it in its arguments.
        assert {str(path.relative_to(cli.state)) for path in files_with_canary([cli.folder])} == {"credentials/store.json"}
        assert not files_with_canary([Path(f"/dev/shm/distflow-{os.getuid()}")])
        assert not [one for one in processes_with_canary() if "rclone" not in one]
        for pid in transfer_pids():
            # Only root may read the environments, and processes of other tests may end meanwhile.
            with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
                assert not has_canary(Path(f"/proc/{pid}/environ").read_bytes())
        server.thaw()
        cli.await_status(workflow, "COMPLETED")
        events = cli.run("workflow", "events", workflow)
        assert "its output is at s3://b/x: 1 file, 2 B" in events.out
        assert "through this machine" not in events.out
        # If a store refuses the key, the events show its answer without the key.
        server.stop()
        with S3Server(tmp_path_factory.mktemp("other"), access_key=AUTH) as other:
            other.bucket("b")
            _set_store_credential(cli, tmp_path_factory.mktemp("fields"), other.url)
            refused = cli.submit(cli.spec(WRITER))
            cli.await_status(refused, "FAILED")
    assert ": the store refused access: " in cli.run("workflow", "events", refused).out
    results = [cli.run("workflow", verb, one) for verb in ("query", "events", "logs") for one in (workflow, refused)]
    assert not [one for one in results if has_canary((one.out + one.err).encode())]
    assert {str(path.relative_to(cli.state)) for path in files_with_canary([cli.folder])} == {"credentials/store.json"}


def _set_store_credential(cli: Cli, folder: Path, url: str) -> None:
    """Set the DATA credential of the bucket, with its secret key from standard input."""
    words = []
    for key, value in (("endpoint", "s3://b"), ("access_key_id", "test-key"), ("override_url", url)):
        (folder / key).write_text(value)
        words += ["--payload-file", f"{key}={folder / key}"]
    done = cli.run("credential", "set", "store", "--type", "DATA", *words, "--payload-file", "access_key=-", stdin=FILE)
    assert done.code == 0, done.err


def transfer_pids() -> list[str]:
    """Return the pids of processes that write an output to a store."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text() == "df-data\n":
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_a_submitted_workflow_keeps_the_values_of_a_deleted_credential(cli: Cli) -> None:
    set_credential(cli, "wandb", ENV, key="api_key")
    go = cli.folder / "GO"
    command = f"    command: [sh, -c, 'test $(printf %s $WANDB_API_KEY | wc -c) = {len(ENV)} && echo had it']\n"
    text = SPEC.split("      deploy", maxsplit=1)[0] + command
    blocker = cli.submit(cli.spec(BLOCKER.replace("GO", str(go)), "first.yaml"))
    # This workflow gets its secrets when it starts, after the blocker has ended.
    waiting = cli.submit(cli.spec(text.replace("  tasks:", "  resources: {default: {cpu: 64}}\n  tasks:")))
    assert cli.run("credential", "delete", "wandb").code == 0
    go.touch()
    cli.await_status(blocker, "COMPLETED")
    cli.await_status(waiting, "COMPLETED")
    assert cli.logs(waiting) == "[talker] had it\n"
    # A second submission reads the credential again.
    done = cli.run("workflow", "submit", waiting)
    assert (done.code, "this machine has no credential `wandb`" in done.err) == (2, True), done.err
    set_credential(cli, "wandb", ENV, key="api_key")
    cli.await_status(cli.submit(waiting), "COMPLETED")


def test_validate_checks_the_credentials_of_this_machine(cli: Cli) -> None:
    spec = cli.spec(SPEC)
    # On a machine without credentials, `validate` only warns.
    done = cli.run("workflow", "validate", spec)
    assert (done.code, done.err.count("warning: this machine has no credential")) == (0, 2), done.err
    assert not cli.state.exists()
    refused = cli.run("workflow", "submit", spec)
    assert (refused.code, refused.err.count("error: this machine has no credential")) == (2, 2), refused.err
    set_credential(cli, "wandbb", ENV, key="api_key")
    set_credential(cli, "deploy", AUTH, key="auth", kind="REGISTRY")
    done = cli.run("workflow", "validate", spec, "-t", "json")
    assert done.code == 2
    problems = json.loads(done.out)["error"]["problems"]
    assert [(one["line"], one["message"]) for one in problems] == [
        (7, "this machine has no credential `wandb`"),
        (8, "tasks cannot use the credential `deploy`"),
    ]
    assert "did you mean `wandbb`?" in problems[0]["hint"]


def test_set_env_takes_a_value_from_the_environment(cli: Cli) -> None:
    spec = cli.spec("workflow: {name: env, tasks: [{name: a, command: [sh, -c, 'printf %s $SET | wc -c; echo $SET']}]}")
    refused = cli.run("workflow", "submit", spec, "--set-env", "SET")
    assert (refused.code, "value 1 of --set-env is neither NAME=VALUE nor a variable" in refused.err) == (2, True)
    cli.environment["SET"] = SET
    process = cli.start("workflow", "submit", spec, "--set-env", "SET", "--wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "env-1\n"
    assert not processes_with_canary()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == f"[a] {len(SET)}\n[a] ********\n"


def test_set_env_overrides_a_credential(cli: Cli) -> None:
    set_credential(cli, "wandb", ENV, key="api_key")
    text = SPEC.split("      deploy", maxsplit=1)[0] + "    command: [sh, -c, 'printf %s $WANDB_API_KEY | wc -c']\n"
    done = cli.run("workflow", "submit", cli.spec(text), "--set-env", "WANDB_API_KEY=12345", "--wait")
    assert done.code == 0, done.err
    assert "[talker] 5\n" in done.out
