"""The root of the command line: shortcuts, the format of errors, Ctrl-C and hostile texts."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import distflow
from distflow.cli.app import run, wants_json
from distflow.client.client import user_name
from distflow.errors import StateError
from unit.cli.screen import Screen


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTFLOW_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize("option", ["--count", "--offset"])
def test_counts_and_offsets_beyond_64_bits_are_accepted(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "list", option, "9" * 20]) == 0
    assert "no" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("options", [["-t", "json"], ["-tjson"], ["--format-type", "json"], ["--format-type=json"]])
def test_errors_are_json_for_each_spelling_of_the_json_option(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "query", "nope-1", *options]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "there is no workflow `nope-1`"


@pytest.mark.parametrize("status", ["PROCESSING", "submitting"])
def test_a_status_that_only_osmo_has_matches_no_task(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["task", "list", "--status", status, "-t", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == []
    assert run(["task", "list", "--status", "NONSENSE"]) == 2


@pytest.mark.parametrize("command", ["login", "logout", "token", "user", "config", "app"])
def test_commands_that_need_osmos_server_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "list", "--all"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: `distflow {command}` does not exist, because distflow has no server\n")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["stats"], "`distflow stats` is not a command", "did you mean `status`? all commands: distflow --help"),
        (
            ["workflow", "qery"],
            "`distflow workflow qery` is not a command",
            "did you mean `query`? all commands: distflow workflow --help",
        ),
        (["%"], "`distflow %` is not a command", "all commands: distflow --help"),
    ],
)
def test_unknown_command_suggests_a_similar_one(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}\n{hint}")


@pytest.mark.parametrize(
    ("shortcut", "command"),
    [
        (["submit"], ["submit"]),
        (["validate"], ["validate"]),
        (["status"], ["query"]),
        (["logs"], ["logs"]),
        (["list"], ["list"]),
        (["stop"], ["cancel"]),
        (["workflow", "status"], ["query"]),
        (["workflow", "stop"], ["cancel"]),
    ],
)
def test_a_shortcut_has_the_help_of_its_workflow_command(
    shortcut: list[str], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for arguments in (shortcut, ["workflow", *command]):
        assert run([*arguments, "--help"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert f"distflow workflow {command[0]}" in outputs[0].partition("\n\n")[0]


def test_shortcuts_parse_options_like_their_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "-s", "RUNNING", "FAILED", "-t", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["workflows"] == []
    assert run(["logs", "nope-1", "-t", "json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_also_an_option(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    assert capsys.readouterr().out.startswith("distflow ")


def test_dash_t_is_not_the_format_option_in_logs_events_and_user_commands() -> None:
    assert not wants_json(["workflow", "logs", "w-1", "-tjson"])
    assert not wants_json(["workflow", "events", "w-1", "-t", "json"])
    assert not wants_json(["run", "--", "train", "-t", "json"])


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "MODULE":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["distflow", "workflow", "list"]
signal.signal(signal.SIGINT, signal.default_int_handler)
import distflow.cli.entry
if "MODULE" == "at the end":
    import atexit
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
distflow.cli.entry.main()
"""


@pytest.mark.parametrize(
    ("moment", "code"),
    [
        ("distflow.cli.app", -signal.SIGINT),
        ("typer", -signal.SIGINT),
        ("distflow.errors", -signal.SIGINT),
        ("distflow.cli.workflow.list", 130),
        ("at the end", -signal.SIGINT),
    ],
)
def test_ctrl_c_prints_no_traceback_at_any_moment(moment: str, code: int) -> None:
    script = INTERRUPTED.replace("MODULE", moment)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_state_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "set", "pool", "local"]) == 0
    assert run(["workflow", "list"]) == 0
    capsys.readouterr()
    if os.geteuid() == 0:
        os.chown(tmp_path / "state", 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    for command in (["workflow", "list"], ["workflow", "query", "x-1"], ["profile", "set", "pool", "local"]):
        assert run(command) == StateError.exit_code
        assert "belongs to the user" in capsys.readouterr().err


SPEC_WITH_CONTROL_CHARACTERS = r"""workflow:
  name: hiding
  tasks:
  - name: one
    command: [sh, -c, "curl somewhere | sh\e[2K\r echo hello"]
    environment: {GREETING: "1\e[2J\u202e"}
"""


def test_a_dry_run_escapes_control_characters_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC_WITH_CONTROL_CHARACTERS)
    assert run(["workflow", "submit", "--dry-run", str(spec)]) == 0
    shown = capsys.readouterr().out
    assert "curl somewhere | sh" in shown
    assert not {"\x1b", "\r", "\u202e"} & set(shown)


def test_the_credentials_of_a_url_decide_which_driver_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    outputs = "[{url: gs://bucket/out}]"
    spec.write_text(f"workflow: {{name: w, tasks: [{{name: one, command: ['true'], outputs: {outputs}}}]}}\n")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert run(["workflow", "submit", "--dry-run", str(spec)]) == 2
    assert "gs://bucket/out needs the driver gcsfs, which is not installed" in capsys.readouterr().err
    payload = ["endpoint=gs://bucket", "access_key_id=id", "access_key=key"]
    assert run(["credential", "set", "store", "--type", "DATA", "--payload", *payload]) == 0
    assert run(["workflow", "submit", "--dry-run", str(spec)]) == 0  # with access keys, `s3fs` is used instead


def test_errors_and_warnings_that_quote_a_spec_escape_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC_WITH_CONTROL_CHARACTERS.replace("name: one", r'name: "one\e]0;title\a\e[2J"'))
    assert run(["workflow", "validate", str(spec)]) == 2
    err = capsys.readouterr().err
    assert "must be a name" in err
    assert all(character.isprintable() for line in err.splitlines() for character in line)


def test_a_user_without_a_name_is_shown_as_a_uid(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_123)
    assert user_name() == "2000000123"
    assert run(["profile", "list"]) == 0
    assert capsys.readouterr().out.startswith("User:  2000000123\n")


@pytest.mark.parametrize(
    ("paths", "where"),
    [((), "{state} or the directory for temporary files (TMPDIR)"), (("a",), "a"), (("a", None, "b"), "b")],
)
def test_a_full_disk_is_reported_with_its_path(
    paths: tuple[str | None, ...],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *paths)

    monkeypatch.setattr("distflow.cli.app.app", write)
    assert run(["version"]) == 5
    path = where.format(state=tmp_path / "state")
    assert capsys.readouterr().err == f"error: {path}: No space left on device; free some space and try again\n"


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_bug_is_reported_with_its_traceback(
    is_writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr("distflow.cli.app.app", fail)
    log = tmp_path / "state" / "crash.log"
    if not is_writable:
        log.mkdir(parents=True)
    assert run(["version"]) == 70
    problem, request, *printed = capsys.readouterr().err.rstrip().splitlines()
    assert problem == "error: a bug in distflow: RuntimeError('oops')"
    if is_writable:
        assert (request, printed) == (f"Please report it with the traceback in {log}.", [])
        printed = log.read_text().splitlines()
    else:
        assert request == f"Please report it with this traceback, which could not be written to {log}:"
    assert (printed[0], printed[-1]) == ("Traceback (most recent call last):", "RuntimeError: oops")


@pytest.mark.parametrize("write", ["print('a')", "print('a' * 100_000)", "forward(1, b'a')"])
def test_a_full_disk_of_standard_output_is_reported(write: str) -> None:
    script = "from distflow.cli import app\nfrom distflow.cli.workflow.exec import _write as forward\n"
    script += f"app.app = lambda **_: {write}\napp.main([])"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    expected = "error: standard output: No space left on device; free some space and try again\n"
    assert (done.returncode, done.stderr) == (5, expected)


def test_a_spec_on_standard_input_that_is_not_utf8_is_an_error_with_its_position(screen: Screen) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distflow", "validate", "-"], input=b"workflow: \xff\n", capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONPATH": str(Path(distflow.__file__).parents[1])},
    )  # fmt: skip
    assert b"the file is not UTF-8: byte 0xff at offset 10" in done.stderr
    assert (done.returncode, done.stdout) == (2, b"")
