"""Completion in real shells, as ``distflow --install-completion`` sets it up."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.testing.waiting import wait_until
from unit.state.stored import completed_group, submit, workflow

PROMPT = "ready> "
START = {
    "bash": (["bash", "-i"], ".bashrc", f"PS1='{PROMPT}'\n"),
    "zsh": (["zsh", "-i"], ".zshrc", f"PS1='{PROMPT}'\nunsetopt prompt_sp\n"),
    "fish": (["fish", "-i"], ".config/fish/config.fish", f"function fish_prompt; printf '{PROMPT}'; end\n"),
}
LINES = {
    "distflow workf": "distflow workflow",
    "distflow workflow que": "distflow workflow query",
    "distflow logs digits-1 --task mas": "distflow logs digits-1 --task master",
    "distflow workflow list --status FAILED_IM": "distflow workflow list --status FAILED_IMAGE_PULL",
    "distflow login x": "distflow login x",
}
"""The text before Tab is pressed, and the completed line."""


class Shell:
    """A shell in a pseudo-terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=environment["HOME"]
        )
        os.close(slave)
        self.output = ""

    def read_output(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 65536).decode(errors="replace")
        return self.output

    def await_text(self, text: str) -> None:
        try:
            wait_until(lambda: text in self.read_output(), 40)
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in {self.output!r}") from None
        self.output = self.output.partition(text)[2]

    def complete(self, line: str) -> None:
        """Type a line and Tab, and let the shell print the completed line."""
        os.write(self.master, f"{line}\t\x01echo 'LINE:' \r".encode())


@contextmanager
def shell(name: str, folder: Path) -> Iterator[Shell]:
    """Install the completion in a separate home, and start the shell there."""
    command, file, settings = START[name]
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    rc = folder / file
    rc.parent.mkdir(parents=True, exist_ok=True)
    rc.write_text(settings)
    # Without this directory, fish reads all manual pages of the machine when it starts for the first time.
    (folder / ".local/share/fish/generated_completions").mkdir(parents=True)
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = dict(os.environ) | {"HOME": str(folder), "PATH": paths, "TERM": "xterm", "SHELL": program}
    install = [program, "-c", "distflow --install-completion; true"]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert f"{name} completion installed" in done.stdout, done
    one = Shell(command, environment)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


@pytest.mark.parametrize("name", START)
def test_tab_completes_commands_tasks_and_statuses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    with Store(StateDirectory(state).ensure().store) as store:
        submit(store, workflow([completed_group()]))
    monkeypatch.setenv("DISTFLOW_STATE", str(state))
    with shell(name, tmp_path) as one:
        one.await_text(PROMPT)
        for typed, completed in LINES.items():
            one.complete(typed)
            one.await_text(f"LINE: {completed}\r\n")
            assert "rror" not in one.output
            one.await_text(PROMPT)
