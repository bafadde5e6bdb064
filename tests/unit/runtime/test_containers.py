"""The command lines that run containers: their options, and that they contain no secrets."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.files import attempt_files
from distflow.runtime.guard import command, containers, netcat
from distflow.runtime.wire import OpError


@pytest.fixture(autouse=True)
def _no_netcat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not create the substitute for `nc`."""
    monkeypatch.setattr(netcat, "add_to", lambda _directory: "")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with a docker and a podman that write their arguments to a file."""
    for name in ("docker", "podman"):
        program = tmp_path / name
        program.write_text(
            '#!/bin/sh\nprintf "%s\\n" "$@" > "$0.args"; [ "$1" != rm ] || { echo "boom: $DOCKER_HOST" >&2; exit 1; }\n'
        )
        program.chmod(0o700)
    return str(tmp_path)


def launch(**container: Any) -> dict[str, Any]:
    return {
        "argv": ["python3", "train.py", "--lr", "1"],
        "env": {"LR": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
        "secret_env": {"TOKEN": "canary"},
        "cwd": "work",
        "container": {"runtime": "podman", "image": "repo/image:1", "mounts": ["/a:/b"], "privileged": False, **container},
    }


def removal_data(one: dict[str, Any], attempt: str, env: dict[str, str]) -> dict[str, Any]:
    """Return the data that is stored for the removal of a launch's container."""
    known = containers.identify(one, attempt, env)
    assert known is not None
    return known


def test_no_value_of_an_environment_variable_is_in_the_command_line(path: str) -> None:
    env = {"PATH": path, "LR": "1", "TOKEN": "canary", "DISTFLOW_ATTEMPT": "w/g/t/0"}
    arguments = containers.wrap(launch(), "w/g/t/0", "/attempt", env)
    assert arguments[:2] == [f"{path}/podman", "run"]
    assert "canary" not in " ".join(arguments)
    assert [arguments[at + 1] for at, word in enumerate(arguments) if word == "--env"] == [
        "CUDA_VISIBLE_DEVICES", "DISTFLOW_ATTEMPT", "LR", "TOKEN",
    ]  # fmt: skip
    assert arguments[-6:] == ["--entrypoint", "python3", "repo/image:1", "train.py", "--lr", "1"]
    assert "/attempt:/attempt" in arguments
    assert "/a:/b" in arguments
    assert "nvidia.com/gpu=all" in arguments
    assert "--privileged" in containers.wrap(launch(privileged=True), "w/g/t/0", "/attempt", env)


def test_limits_are_passed_to_the_engine(path: str) -> None:
    env = {"PATH": path}
    text = " ".join(containers.wrap(launch(memory=1 << 30, cpus=9999), "w/g/t/0", "/attempt", env))
    assert f"--memory {1 << 30} --memory-swap {1 << 30} --cpus {os.cpu_count()}" in text
    assert "--rm" not in text
    without = containers.wrap(launch(memory=None, cpus=None), "w/g/t/0", "/attempt", env)
    assert "--rm" in without
    assert not {"--memory", "--cpus"} & set(without)


def test_the_specs_path_applies_inside_the_container_and_the_nodes_path_outside(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path)
    own = launch() | {"env": {"PATH": "/opt/inside"}, "path_prepend": ["/venv/bin"]}
    env = command.environment(own, "w/g/t/0", "/attempt")
    assert path in env["PATH"].split(":")
    arguments = containers.wrap(own, "w/g/t/0", "/attempt", env)
    assert arguments[0] == f"{path}/podman"
    assert [word for word in arguments if "PATH" in word] == ["PATH=/opt/inside"]
    env = command.environment(own | {"container": None}, "w/g/t/0", "/attempt")
    assert env["PATH"].split(":")[:2] == ["/venv/bin", "/opt/inside"]
    assert path not in env["PATH"].split(":")


def test_distflow_train_can_be_imported_inside_the_container(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path)
    own = launch() | {"python_path": ["/attempt/lib"], "env": {"PYTHONPATH": "/mine"}}
    env = command.environment(own, "w/g/t/0", "/attempt")
    assert env["PYTHONPATH"] == "/mine:/attempt/lib"
    without = own | {"env": {}}
    assert "PYTHONPATH" in containers.wrap(without, "w/g/t/0", "/attempt", command.environment(without, "w/g/t/0", "/attempt"))
    assert "PYTHONPATH" not in containers.wrap(launch(), "w/g/t/0", "/attempt", env)


def test_programs_for_the_task_precede_the_path_of_the_image(path: str) -> None:
    own = launch() | {"path": ["/attempt/bin"]}
    for arguments in (
        containers.wrap(own, "w/g/t/0", "/attempt", {"PATH": path}),
        containers.enter(own, "w/g/t/0", "/attempt", {"PATH": path}, terminal=False),
    ):
        assert arguments[-5:] == ["/attempt/bin", "python3", "train.py", "--lr", "1"]
        at = arguments.index("-c")
        done = subprocess.run(
            ["/bin/sh", "-c", arguments[at + 1], "/attempt/bin", "sh", "-c", 'echo "$PATH $1"', "x", "a b"],
            env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == "/attempt/bin:/usr/bin:/bin a b\n"


def test_the_data_for_removing_a_container_contains_no_secret(path: str) -> None:
    env = {
        "PATH": path,
        "DOCKER_HOST": "unix:///x",
        "DOCKER_TOKEN": "canary",
        "DOCKER_AUTH_CONFIG": "canary",
        "HOME": "/home/me",
    }
    secret = launch() | {"secret_env": {"DOCKER_TOKEN": "canary"}}
    known = removal_data(secret, "w/g/t/0", env)
    assert known["env"] == {"DOCKER_HOST": "unix:///x", "HOME": "/home/me"}
    assert known["name"] in containers.wrap(launch(), "w/g/t/0", "/attempt", env)
    assert removal_data(secret, "w/g/t/1", env)["name"] != known["name"]


def test_a_failed_removal_of_a_container_is_reported(path: str) -> None:
    known = removal_data(launch(), "w/g/t/0", {"PATH": path, "DOCKER_HOST": "unix:///x"})
    assert containers.remove(known) == f"its container `{known['name']}` could not be removed: boom: unix:///x"
    assert Path(path, "podman.args").read_text().split() == ["rm", "--force", known["name"]]
    assert containers.remove(None) is None
    gone = containers.remove({**known, "program": "/nowhere/podman"})
    assert gone is not None
    assert "cannot run `/nowhere/podman`" in gone


def test_runtime_auto_uses_the_first_installed_program(path: str) -> None:
    auto = launch(runtime="auto")
    assert removal_data(auto, "w/g/t/0", {"PATH": path})["program"] == f"{path}/docker"
    os.unlink(f"{path}/docker")
    assert removal_data(auto, "w/g/t/0", {"PATH": path})["program"] == f"{path}/podman"


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("docker", "docker is not in PATH on this node; install it, or"),
        ("auto", "none of docker, podman, apptainer is in PATH on this node; install one, or"),
    ],
)
def test_a_missing_program_is_an_error_with_a_remedy(runtime: str, message: str) -> None:
    with pytest.raises(OpError) as caught:
        containers.pull(launch(runtime=runtime)["container"], {"PATH": "/nowhere"}, "/root")
    assert caught.value.kind == "no_container"
    assert message in caught.value.message


@pytest.mark.parametrize("program", ["docker", "apptainer"])
def test_a_pull_that_takes_too_long_is_an_error_with_the_image(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / program
    path.write_text('#!/bin/sh\ncase "$1" in image) exit 1;; esac\nexec sleep 60\n')
    path.chmod(0o700)
    monkeypatch.setattr(containers, "_PULL_S", 0.36)
    with pytest.raises(OpError) as caught:
        containers.pull(
            launch(runtime=program, mounts=[])["container"], {"PATH": f"{tmp_path}:/usr/bin:/bin"}, str(tmp_path / "root")
        )
    assert caught.value.kind == "timeout"
    assert caught.value.message.startswith(f"pulling the image `repo/image:1` with `{program}` did not finish within 0.0001 h")


@pytest.fixture
def with_apptainer(tmp_path: Path) -> str:
    """A PATH with an apptainer that creates the image file, and records its arguments and its login."""
    program = tmp_path / "apptainer"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/args\n'
        f'echo "$APPTAINER_DOCKER_USERNAME $APPTAINER_DOCKER_PASSWORD" >> {tmp_path}/login\n'
        'case "$4" in docker://none*) echo "FATAL: no such image" >&2; exit 255;; esac\necho image > "$3"\n'
    )
    program.chmod(0o700)
    return str(tmp_path)


def test_apptainer_pulls_an_image_once_to_a_file(with_apptainer: str, tmp_path: Path) -> None:
    env, root = {"PATH": f"{with_apptainer}:/usr/bin:/bin"}, str(tmp_path / "root")
    login = {"registry": "r", "auth": "bWU6Y2FuYXJ5"}
    container = launch(runtime="apptainer", mounts=[])["container"]
    assert containers.pull(container, env, root, login) == {"program": f"{with_apptainer}/apptainer", "was_there": False}
    assert containers.pull(container, env, root, login)["was_there"] is True
    (line,) = Path(with_apptainer, "args").read_text().splitlines()
    assert line.startswith("pull --force ")
    assert line.endswith(" docker://repo/image:1")
    assert "canary" not in line
    assert Path(with_apptainer, "login").read_text() == "me canary\n"
    assert [path.suffix for path in (tmp_path / "root" / "images").iterdir()] == [".sif"]
    assert containers.pull({**container, "image": "oras://repo/image.sif"}, env, root)["was_there"] is False
    assert Path(with_apptainer, "args").read_text().splitlines()[-1].endswith(" oras://repo/image.sif")
    with pytest.raises(OpError, match="cannot pull the image `none:1`: FATAL: no such image"):
        containers.pull({**container, "image": "none:1"}, env, root)
    (tmp_path / "mine.sif").touch()
    assert containers.pull({**container, "image": str(tmp_path / "mine.sif")}, env, root)["was_there"] is True
    with pytest.raises(OpError, match=r"/nowhere/x.sif` does not exist on this node"):
        containers.pull({**container, "image": "/nowhere/x.sif"}, env, root)


def test_apptainer_gets_values_in_variables_and_needs_no_removal(with_apptainer: str) -> None:
    env = {"PATH": with_apptainer, "LR": "1", "TOKEN": "canary", "CUDA_VISIBLE_DEVICES": "0,1", "DISTFLOW_ATTEMPT": "w/g/t/0"}
    own = launch(runtime="apptainer", image="/images/x.sif")
    arguments = containers.wrap(own, "w/g/t/0", "/root/w/g/t/0", env)
    assert arguments == [
        f"{with_apptainer}/apptainer", "exec", "--cleanenv", "--no-eval", "--writable-tmpfs", "--bind", "/root/w/g/t/0",
        "--pwd", "/root/w/g/t/0/work", "--bind", "/a:/b", "--nv", "/images/x.sif", "python3", "train.py", "--lr", "1",
    ]  # fmt: skip
    assert (env["APPTAINERENV_TOKEN"], env["APPTAINERENV_LR"]) == ("canary", "1")
    assert containers.identify(own, "w/g/t/0", env) is None
    # A further command gets the same image.
    assert containers.enter({**own, "argv": ["sh"]}, "w/g/t/0", "/root/w/g/t/0", env, True)[-2:] == ["/images/x.sif", "sh"]
    with pytest.raises(OpError, match="`privileged` needs docker or podman"):
        containers.wrap(launch(runtime="apptainer", privileged=True), "w/g/t/0", "/root/w/g/t/0", env)


# -- the login for one pull

LOGIN = {"registry": "registry.example", "auth": "dXNlcjpwYXNz"}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    made = tmp_path / "shm"
    made.mkdir()
    monkeypatch.setattr(attempt_files, "_MEMORY", str(made))
    monkeypatch.setattr(attempt_files, "_has_memory", lambda: True)
    return made / f"distflow-{os.getuid()}"


def test_the_users_docker_settings_apply_except_for_logins(tmp_path: Path, memory: Path) -> None:
    own = tmp_path / ".docker"
    (own / "contexts").mkdir(parents=True)
    settings = {"currentContext": "lab", "credsStore": "desktop", "auths": {"registry.example": {"auth": "b3RoZXI="}}}
    (own / "config.json").write_text(json.dumps(settings))
    with containers.login_folder(LOGIN, {"HOME": str(tmp_path)}) as folder:
        assert Path(folder).parent == memory
        assert [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, f"{folder}/config.json")] == [0o700, 0o600]
        found = json.loads(Path(folder, "config.json").read_text())
        assert found == {"currentContext": "lab", "auths": {"registry.example": {"auth": "dXNlcjpwYXNz"}}}
        assert Path(folder, "contexts").samefile(own / "contexts")
    assert not os.path.exists(folder)
    assert (own / "contexts").is_dir()
    assert json.loads((own / "config.json").read_text()) == settings


def test_the_next_pull_removes_the_login_of_a_killed_pull(memory: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    for name in (f"login-{process.pid}-abc", f"login-{os.getpid()}-abc"):
        (memory / name).mkdir(parents=True)
    memory.chmod(0o700)
    with containers.login_folder(LOGIN, {"HOME": str(tmp_path)}):
        assert not (memory / f"login-{process.pid}-abc").exists()
    assert (memory / f"login-{os.getpid()}-abc").exists()


def test_without_memory_the_login_is_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_files, "_has_memory", lambda: False)
    with containers.login_folder(LOGIN, {"DOCKER_CONFIG": str(tmp_path / "nothing")}) as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert json.loads(Path(folder, "config.json").read_text())["auths"]["registry.example"] == {"auth": "dXNlcjpwYXNz"}
    assert not os.path.exists(folder)
