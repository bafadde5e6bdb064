"""Tasks in containers of a real podman and a real dockerd: files, tokens, signals, exit codes and faults."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from distflow.testing.engines import IMAGE, ContainerEngine, Dockerd, Podman, missing_dockerd, missing_podman, skeleton
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import copy_specs
from scenarios.registry import Registry
from scenarios.test_leftovers import crash

UNIQUE_SECONDS = str(100_000 + os.getpid())
"""The duration of a ``sleep`` that no concurrent test starts, by which the test finds its own."""
REPOSITORY = Path(__file__).parents[2]
MOUNTS = json.dumps(["/usr", *sorted({sys.prefix, sys.base_prefix} - {"/usr"}), str(REPOSITORY)])


@pytest.fixture(params=["podman", "docker"])
def engine(request: pytest.FixtureRequest, cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEngine]:
    """A container engine, and a pool that runs images with it."""
    is_podman = request.param == "podman"
    if why := missing_podman() if is_podman else missing_dockerd():
        pytest.skip(why)
    made = Podman if is_podman else Dockerd
    with made(tmp_path_factory.mktemp("engine")) as running:
        cli.configure(
            cpus=64,
            container=request.param,
            environment=json.dumps(running.environment),
            stop_grace="5s",
            peer_failed_grace="1s",
        )
        yield running
        assert running.containers() == []


def spec(cli: Cli, tasks: str, *, is_gang: bool = True) -> str:
    """Write a workflow of one group, or of one group for each task."""
    group = "  groups:\n  - name: g\n    tasks:\n" if is_gang else "  tasks:\n"
    text = f"workflow:\n  name: boxed\n{group}"
    return cli.spec(text + tasks.replace("IMAGE", IMAGE).replace("MOUNTS", MOUNTS))


CREDENTIALS = """
      credentials: {wandb: {TOKEN: key}, deploy: /run/secrets/deploy}
      volumeMounts"""
ONE = """
    - name: one
      image: IMAGE
      volumeMounts: MOUNTS
      command: [sh, -c]
      args:
      - COMMAND
"""


def test_a_task_in_a_container_has_its_files_variables_and_exit_code(cli: Cli, engine: ContainerEngine) -> None:
    tasks = """
    - name: one
      image: IMAGE
      volumeMounts: [/usr, /dev/shm]
      environment: {GREETING: "hello {{workflow_id}}"}
      files:
      - {path: /etc/hello.txt, contents: "from a file of {{workflow_id}}"}
      - {path: adjacent.txt, contents: "from the directory"}
      command: [sh, -c]
      args:
      - |
        test -e /etc/os-release && echo "this is not a container"
        echo "$GREETING"; cat /etc/hello.txt; echo; cat adjacent.txt; echo; echo "$TOKEN" | tr a-z A-Z
        echo done > "{{output}}/out.txt"; echo "$DISTFLOW_ATTEMPT_DIR"; exit 3
"""
    done = cli.run("workflow", "submit", spec(cli, tasks), "--set-env", "TOKEN=canary", "--wait")
    assert done.code == 1
    lines = [line.removeprefix("[one] ") for line in done.out.splitlines() if line.startswith("[one] ")]
    assert lines[:4] == ["hello boxed-1", "from a file of boxed-1", "from the directory", "CANARY"]
    task = cli.tasks("boxed-1")["one"]
    assert (task["status"], task["exit_code"], task["signal"]) == ("FAILED", 3, None)
    assert (Path(lines[4]) / "output" / "out.txt").read_text() == "done\n"
    assert done.err.count("is ignored") == 0


@pytest.mark.timeout(400)
def test_two_containers_train_as_one_world(cli: Cli, engine: ContainerEngine, forking_site: str) -> None:
    specs = copy_specs(cli, REPOSITORY)
    text = (specs / "pytorch_dist.yaml").read_text()
    mounts = json.dumps([*json.loads(MOUNTS), forking_site])
    image = f"image: {IMAGE}\n      volumeMounts: {mounts}\n      command: [{sys.executable}, "
    text = text.replace("command: [python3, ", image).replace(
        "environment:\n", f"environment:\n        PYTHONPATH: {forking_site}\n"
    )
    (specs / "boxed.yaml").write_text(text)
    done = cli.run("workflow", "submit", str(specs / "boxed.yaml"), "--wait", "--set", "epochs=2", timeout=300)
    assert done.code == 0, done.out + done.err
    assert {task["status"] for task in cli.tasks("pytorch-dist-1").values()} == {"COMPLETED"}


def test_a_container_that_uses_too_much_memory_is_evicted(cli: Cli, engine: ContainerEngine) -> None:
    hoard = "resource: small\n      command: [python3, -c, 'kept = bytearray(b\"x\" * (256 << 20)); print(len(kept))']"
    task = ONE.replace("command: [sh, -c]\n      args:\n      - COMMAND", hoard)
    path = Path(spec(cli, task))
    path.write_text(path.read_text().replace("workflow:\n", "workflow:\n  resources: {small: {memory: 100Mi, cpu: 1}}\n"))
    done = cli.run("workflow", "submit", str(path), "--wait")
    assert done.code == 1
    one = cli.tasks("boxed-1")["one"]
    assert (one["status"], one["exit_code"]) == ("FAILED_EVICTED", 3004), one
    # The reason comes from the engine, or from the kernel: podman with cgroup v1 does not report it.
    assert "memory" in one["failure_message"]


@pytest.mark.timeout(900)
def test_memory_usage_includes_the_processes_in_the_container(cli: Cli, engine: ContainerEngine) -> None:
    hold = "command: [python3, -c, 'import time; kept = bytearray(b\"x\" * (150 << 20)); time.sleep(600)']"
    ident = cli.submit(spec(cli, ONE.replace("command: [sh, -c]\n      args:\n      - COMMAND", hold)))

    def is_measured() -> bool:
        usage = cli.tasks(ident)["one"]["usage"]
        return usage is not None and usage["memory"] > 150 << 20

    # The sampler pauses for 300 times the processor time of a sample, which is long on a busy machine.
    wait_until(is_measured, 600, "a sample of the processes in the container")
    assert cli.run("workflow", "cancel", ident, "--wait", "60").code == 0


def test_a_cancel_ends_all_processes_in_the_containers(cli: Cli, engine: ContainerEngine) -> None:
    tasks = ""
    for name, trap in (("obeys", "trap 'echo got TERM; exit 0' TERM"), ("ignores", "trap '' TERM")):
        command = json.dumps(f"{trap}; echo up; setsid sleep {UNIQUE_SECONDS} & while :; do sleep 0.2; done")
        tasks += ONE.replace("one", name).replace("COMMAND", command)
    ident = cli.submit(spec(cli, tasks, is_gang=False))
    for name in ("obeys", "ignores"):
        cli.await_log(ident, f"[{name}] up")
    assert len(engine.containers()) == 2
    assert cli.run("workflow", "cancel", ident, "--wait", "60").code == 0
    assert [task["status"] for task in cli.tasks(ident).values()] == ["FAILED_CANCELED"] * 2
    assert [line for line in cli.logs(ident).splitlines() if "TERM" in line] == ["[obeys] got TERM"]
    assert engine.containers() == []
    assert not _is_running(f"sleep\0{UNIQUE_SECONDS}\0")


def test_an_orphan_container_is_reaped(cli: Cli, engine: ContainerEngine) -> None:
    ident = cli.submit(spec(cli, ONE.replace("COMMAND", f"echo up; exec sleep {UNIQUE_SECONDS}")))
    cli.await_log(ident, "up")
    attempt = crash(cli, cli.root)
    (name,) = engine.containers()
    found = json.loads(cli.run("node", "reap", "--dry-run", "-t", "json").out)["nodes"][0]["found"]
    assert [(one["pid"], one["name"], one["attempt"]) for one in found if one["pid"] is None] == [
        (None, f"{engine.program} {name}", attempt)
    ]
    assert engine.containers() == [name]
    done = cli.run("node", "reap")
    assert (done.code, done.err) == (0, "")
    assert engine.containers() == []
    assert not _is_running(f"sleep\0{UNIQUE_SECONDS}\0")
    cli.await_status(ident, "FAILED_SERVER_ERROR")


def test_no_container_remains_when_one_of_its_processes_is_killed(cli: Cli, engine: ContainerEngine) -> None:
    victims = ("client", "keeper", "runner")
    tasks = "".join(ONE.replace("one", name) for name in victims).replace("COMMAND", f"echo up; exec sleep {UNIQUE_SECONDS}")
    ident = cli.submit(spec(cli, tasks, is_gang=False))
    for name in victims:
        cli.await_log(ident, f"[{name}] up")
    uuid = cli.query(ident)["uuid"]
    for remaining, victim in zip((2, 1, 0), victims, strict=True):
        state = json.loads((cli.root / uuid / f"{victim}-group" / victim / "0" / "runner.json").read_text())
        os.kill(state["command" if victim == "client" else victim]["pid"], signal.SIGKILL)
        wait_until(lambda count=remaining: len(engine.containers()) == count, 60, victim)  # type: ignore[misc]
    cli.await_status(ident, "FAILED", "FAILED_SERVER_ERROR")
    assert {task["status"] for task in cli.tasks(ident).values()} <= {"FAILED", "FAILED_SERVER_ERROR"}
    assert not _is_running(f"sleep\0{UNIQUE_SECONDS}\0")


def test_an_image_that_cannot_be_pulled_and_a_missing_directory_of_volume_mounts_are_named(
    cli: Cli, engine: ContainerEngine
) -> None:
    image = ONE.replace("one", "image").replace("IMAGE", "127.0.0.1:9/missing/nothing:1")
    mount = ONE.replace("one", "mount").replace("MOUNTS", "[/usr, '/no/such/place:/data']")
    path = spec(cli, (image + mount).replace("COMMAND", "echo never"), is_gang=False)
    assert cli.run("workflow", "submit", path, "--wait").code == 1
    tasks = cli.tasks("boxed-1")
    assert (tasks["image"]["status"], tasks["image"]["exit_code"]) == ("FAILED_IMAGE_PULL", 302)
    assert "cannot pull the image `127.0.0.1:9/missing/nothing:1`: " in tasks["image"]["failure_message"]
    assert tasks["mount"]["status"] == "FAILED_START_ERROR"
    assert "`volumeMounts`: `/no/such/place` does not exist on this node" in tasks["mount"]["failure_message"]


def test_credentials_exec_and_rsync_reach_a_task_in_a_container(cli: Cli, engine: ContainerEngine) -> None:
    (cli.folder / "value").write_text("canary-5ecret\n")
    for name in ("wandb", "deploy"):
        assert cli.run("credential", "set", name, "--payload-file", "key=value").code == 0
    script = "echo $TOKEN; rev < /run/secrets/deploy/key; echo; echo inside > /tmp/where; echo up; "
    script += "until test -e given/go; do sleep 0.2; done; cat given/go"
    tasks = ONE.replace("COMMAND", script).replace("\n      volumeMounts", CREDENTIALS)
    workflow = cli.submit(spec(cli, tasks))
    log = cli.await_log(workflow, "up")
    assert log == "[one] ********\n[one] terce5-yranac\n[one] up\n"
    done = cli.run("workflow", "exec", workflow, "one", "--entry", "sh -c 'cat /tmp/where; echo $DISTFLOW_TASK; pwd; exit 4'")
    assert done.code == 4, done.err
    assert done.out.splitlines()[:2] == ["inside", "one"]
    assert done.out.splitlines()[2].endswith("/one/0/work")
    if shutil.which("rsync") is None:
        assert cli.run("workflow", "exec", workflow, "one", "--entry", "sh -c 'mkdir given; echo copied > given/go'").code == 0
    else:
        (cli.folder / "given").mkdir()
        (cli.folder / "given" / "go").write_text("copied\n")
        done = cli.run("workflow", "rsync", "upload", workflow, "given:.")
        assert done.code == 0, done.err
    cli.await_status(workflow, "COMPLETED")
    assert cli.logs(workflow).endswith("[one] copied\n")


def test_a_pool_without_containers_warns_once_about_each_ignored_key(cli: Cli) -> None:
    tasks = ONE.replace("MOUNTS", "['/usr:/elsewhere']").replace("COMMAND", "echo ran; exit 0\n      privileged: true")
    done = cli.run("workflow", "submit", spec(cli, tasks), "--wait")
    assert done.code == 0
    assert "[one] ran" in done.out
    for words in ("`image` is ignored", "nothing is mounted at `/elsewhere`", "`privileged` is ignored"):
        assert done.err.count(words) == 1, done.err


def _is_running(command: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().decode(errors="replace").endswith(command):
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize(("engine", "user"), [("podman", "somebody"), ("docker", "")], indirect=["engine"])
def test_an_image_is_pulled_with_the_credential_of_its_registry(cli: Cli, engine: ContainerEngine, user: str) -> None:
    with Registry(user or "$oauthtoken", "canary-pa55word", skeleton()) as registry:
        registries = cli.folder / "registries.conf"
        registries.write_text(f'[[registry]]\nlocation = "{registry.address}"\ninsecure = true\n')
        environment = engine.environment | {"CONTAINERS_REGISTRIES_CONF": str(registries)}
        cli.configure(cpus=64, container=engine.program, environment=json.dumps(environment))
        tasks = ONE.replace("IMAGE", registry.image).replace("COMMAND", "echo it runs")
        done = cli.run("workflow", "submit", spec(cli, tasks), "--wait")
        assert (done.code, cli.tasks("boxed-1")["one"]["status"]) == (1, "FAILED_IMAGE_PULL")
        assert registry.served == []
        payload = [f"registry={registry.address}", "auth=canary-pa55word", *([f"username={user}"] if user else [])]
        assert cli.run("credential", "set", "images", "--type", "REGISTRY", "--payload", *payload).code == 0
        done = cli.run("workflow", "submit", spec(cli, tasks), "--wait")
        assert done.code == 0, done.err
        assert "[one] it runs\n" in done.out
        assert any("/manifests/" in path for path in registry.served)
        # The node keeps the password neither as plain text nor as the Base64 of a login.
        words = (b"canary-pa55word", base64.b64encode(f"{user or '$oauthtoken'}:canary-pa55word".encode()))
        places = [cli.root, cli.folder / ".docker", cli.folder / ".config", Path("/dev/shm"), engine.folder / "client"]
        # Another test on this machine may use the same password in /dev/shm at this moment.
        wait_until(lambda: not _files_with(words, places), 60, "no file contains the password")
        engine.run("rmi", "--force", registry.image)


def _files_with(words: Sequence[bytes], places: Sequence[Path]) -> list[Path]:
    """Return the files below these places that contain one of the words, without the directories of tests in ``/dev/shm``."""
    found = []
    for place in places:
        for folder, folders, names in os.walk(place):
            folders[:] = [name for name in folders if not name.startswith("pytest-of-")]
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    found += [path] if path.is_file() and any(word in path.read_bytes() for word in words) else []
    return found
