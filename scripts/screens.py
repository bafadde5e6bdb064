"""Type the commands of README, the first steps and the tutorials into a real terminal, and draw its contents (`make screens`).

Each page gets a new home directory. The machines that it names are real OpenSSH servers. The terminal is tmux. The script
types one command after another, waits for its end, and compares the output with the page. It draws the commands that a comment
`screen` of the page names (see `tests/pages.py`) to docs/screens/. It replaces names, times and process ids, so two runs differ
little. The exit code is 1 if a command fails or its output differs from the page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import io
import os
import re
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.ansi import AnsiDecoder
from rich.console import Console

from distflow.testing.sshd import missing_sshd
from distflow.testing.waiting import wait_until
from pages import LIMIT_S, REPEAT_S, REPEATABLE, ROOT, Block, Terminal, blocks_of, is_as_shown, screens_of, shown_in, ssh_hosts

SCREENS = ROOT / "docs" / "screens"
COLUMNS, LINES = 100, 50
PAGES = (ROOT / "README.md", ROOT / "docs" / "first-steps.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md")))
SHOWN_AT = dt.datetime(2026, 11, 20, 14, 2, tzinfo=dt.timezone.utc)
"""The time at which each page begins in the pictures. Later times keep their distance from it."""
PROMPT = "$"
LEASES = "/tmp/distflow-leases"  # the default of nodes

# The pictures load no font from another host. Each piece of text has a given length, so columns are right with any font.
SVG = re.sub(r"@font-face \{\{.*?\n    \}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code,", "ui-monospace,")


class Window:
    """A shell in tmux, in the directory of a page."""

    def __init__(self, terminal: Terminal) -> None:
        """Start the shell, and wait for its prompt."""
        folder = terminal.folder.parent
        self._socket = folder / "tmux"
        self._done = folder / "done"
        environment = {
            **{name: value for name, value in terminal.environment.items() if name not in ("NO_COLOR", "COLUMNS", "TMUX")},
            "TERM": "xterm-256color",
        }  # fmt: skip
        settings = folder / "bashrc"
        # The shell writes the number of commands and the last exit code to a file.
        settings.write_text(
            f"PS1='\\[\\e[32m\\]{PROMPT}\\[\\e[0m\\] '; unset HISTFILE; set +H; cd {terminal.folder}\n"
            f"""PROMPT_COMMAND='echo "$((++DONE)) $?" > {self._done}.new && mv {self._done}.new {self._done}'\n"""
        )
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", "new-session", "-d", *size, f"bash --rcfile {settings}"]
        subprocess.run(command, cwd=terminal.folder, env=environment, check=True)
        self._typed = 1
        self._wait()

    def run(self, command: str) -> tuple[int, str]:
        """Type a command, and return its exit code and its output."""
        before = len(self.text().split("\n"))
        for line in command.split("\n"):
            self._tmux("send-keys", "-l", line)
            self._tmux("send-keys", "Enter")
        self._typed += 1
        code = self._wait()
        return code, "\n".join(self.text().split("\n")[before + command.count("\n") : -1])

    def clear(self) -> None:
        """Clear the screen."""
        self._tmux("send-keys", "C-l")

        def is_clear() -> bool:
            self._tmux("clear-history")  # tmux keeps the cleared lines in its history
            return self.text() == PROMPT

        wait_until(is_clear, LIMIT_S, "an empty screen")

    def text(self, *options: str) -> str:
        """Return the text of the terminal, with the lines that are no longer visible.

        After the end of a command, the last line is the prompt.
        """
        lines = self._tmux("capture-pane", "-p", "-J", "-S", "-", *options).rstrip("\n").split("\n")
        return "\n".join(line.rstrip() for line in lines).rstrip()

    def close(self) -> None:
        """End the shell."""
        self._tmux("kill-server")

    def _wait(self) -> int:
        def code() -> str:
            with contextlib.suppress(FileNotFoundError):
                number, _, status = self._done.read_text().partition(" ")
                if int(number) == self._typed and self.text().split("\n")[-1] == PROMPT:
                    return status
            return ""

        return int(wait_until(code, LIMIT_S, "the prompt"))

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self._socket), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def play(blocks: Sequence[Block], folder: Path, draw: Callable[[str, str], None]) -> list[str]:
    """Type the commands of a page in the new home `folder`. Return the failures.

    A command fails if its output differs from the page, or if its exit code is not 0 and the next command does not show `$?`.
    `draw` is called with the name and the text of each picture.
    """
    terminal = Terminal(folder)
    wrong: list[str] = []
    hosts = sorted({name for block in blocks for name in (block.note("hosts") or "").split()})
    with contextlib.ExitStack() as stack:
        if hosts:
            stack.enter_context(ssh_hosts(folder, hosts, machine_like(folder)))
        stack.callback(terminal.end)
        window = Window(terminal)
        stack.callback(window.close)
        as_drawn = drawn_text(folder)
        for block in blocks:
            if name := block.note("file"):
                (terminal.folder / name).write_text(block.text)
            if block.language != "console" or block.note("not run") is not None:
                continue
            any_order, commands = block.note("any order") is not None, list(shown_in(block))
            for number, shown in enumerate(commands, 1):

                def is_right(printed: str, expected: tuple[str, ...] = shown.output, any_order: bool = any_order) -> bool:
                    return not expected or is_as_shown(expected, printed, any_order=any_order)

                if REPEATABLE.match(shown.command):
                    with contextlib.suppress(TimeoutError):
                        wait_until(lambda command=shown.command: is_right(terminal.run(command)[1]), REPEAT_S)  # type: ignore[misc]
                if any(screen.first == number for screen in screens_of(block)):
                    window.clear()
                code, printed = window.run(shown.command)
                is_asked = number < len(commands) and "$?" in commands[number].command
                if not is_right(printed) or (code and not is_asked):
                    wrong.append(f"{block.place}: $ {shown.command}\n{printed}\n(exit code {code})")
                for screen in screens_of(block):
                    if screen.last == number:
                        draw(screen.name, as_drawn(window.text("-e").rpartition("\n")[0]))
    return wrong


def machine_like(folder: Path) -> Callable[[str], Sequence[str]]:
    """Return a function from the name of a host to words that precede the command of its SSH server.

    As root, they give the host its own name, boot id, lease directory and ``/etc/hosts``. Other users get no such words.
    """

    def prefix(name: str) -> Sequence[str]:
        if os.getuid():
            return ()
        own = folder / f"{name}-own"
        (own / "leases").mkdir(parents=True)
        (own / "leases").chmod(0o1777)
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (own / "hosts").write_text(f"127.0.0.1 localhost\n10.0.10.1 {name}\n")
        Path(LEASES).mkdir(mode=0o1777, exist_ok=True)
        mounts = {"leases": LEASES, "boot_id": "/proc/sys/kernel/random/boot_id", "hosts": "/etc/hosts"}
        script = " && ".join(["hostname $0", *(f"mount --bind {own / path} {target}" for path, target in mounts.items())])
        return ("unshare", "--mount", "--uts", "sh", "-c", f'{script} && exec "$@"', name)

    return prefix


def drawn_text(folder: Path) -> Callable[[str], str]:
    """Return a function that replaces text that differs from run to run, such as times, in the text of a terminal."""
    late = dt.datetime.now(dt.timezone.utc).replace(second=0, microsecond=0) - SHOWN_AT
    pids: dict[str, str] = {}

    def shifted(form: str) -> Callable[[re.Match[str]], str]:
        return lambda match: (dt.datetime.strptime(f"{match[0]} +0000", f"{form} %z") - late).strftime(form)

    def pid(match: re.Match[str]) -> str:
        return match[1] + pids.setdefault(match[2], str(4017 + 13 * len(pids)))

    rules: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
        (r"\b[0-9]{4}/[0-9]{2}/[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\b", shifted("%Y/%m/%d %H:%M:%S")),
        (r"\b[A-Z][a-z]{2} [0-9]{2}, [0-9]{4} [0-9]{2}:[0-9]{2}\b", shifted("%b %d, %Y %H:%M")),
        (r"((?:\bpid |^\[1\] ))([0-9]+)", pid),
        (r"(\bport |:)[0-9]{5}\b", r"\g<1>29500"),
        (r"\b127\.0\.3\.([0-9])", r"10.0.10.\1"),  # has the same length, so columns do not change
        (r"\b[0-9a-f]{32}\b", "5e2b0c7d9a814f36b1c8d2e7f0a39c64"),
        (re.escape(str(folder)), "/home/ada"),
        (rf"\b{re.escape(socket.gethostname())}\b", "laptop"),
        (rf"{re.escape(sys.base_prefix)}", "/usr"),
        (rf"{re.escape(sys.prefix)}", "/opt/venv"),
    )

    def drawn(text: str) -> str:
        for pattern, replacement in rules:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        return text

    return drawn


def svg(name: str, text: str) -> str:
    """Return a drawing of a terminal with the given text, whose colors are ANSI escape sequences."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in AnsiDecoder().decode(text):  # colors continue in the next line
        for part in line.divide(range(COLUMNS, len(line), COLUMNS)):
            console.print(part)
    console.print()  # without an empty last line, the picture cuts off the lower ends of letters
    drawing = console.export_svg(title="ada@laptop: ~/project", code_format=SVG, unique_id=f"screen-{name}")
    return "".join(f"{line.rstrip()}\n" for line in drawing.strip().split("\n") if line.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Type the commands of the pages, and write their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="the pages (default: README, the first steps and all tutorials)")
    parser.add_argument("--to", type=Path, default=SCREENS, help="the directory of the pictures")
    given = parser.parse_args(arguments)
    if why := missing_sshd():
        parser.error(why)
    given.to.mkdir(exist_ok=True)
    is_wrong = False

    def draw(name: str, text: str) -> None:
        drawing = svg(name, text)
        (given.to / f"{name}.svg").write_text(drawing, encoding="utf-8")
        print(f"  {name}.svg: {len(drawing) // 1024} KiB", flush=True)

    for page in given.pages or PAGES:
        print(page.name, flush=True)
        with tempfile.TemporaryDirectory(prefix="screens-") as folder:
            for text in play(list(blocks_of(page)), Path(folder), draw):
                is_wrong = True
                print(text, file=sys.stderr)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
