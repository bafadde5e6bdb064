"""Read the fenced blocks of the documentation pages, run their commands, and compare the output with the page.

A block has one of these languages:

* ``console``: a line that begins with ``$ `` is a command (``\\`` at its end continues it in the next line). The lines below it
  are its output in a terminal, standard output and error together. ``…`` matches any text within a line, and alone on a line
  any lines. A command must exit with 0, unless the next command uses ``$?``. Commands that only read (``query``, ``why``,
  ``stacks``, ``list``, ``logs``, ``events``) are repeated until they print the output of the page.
* ``yaml``: a spec, which ``distflow workflow validate`` accepts.
* ``python``: a script if it has a name (``file``), run by the commands of its page; else a fragment, which compiles.
* ``text`` and ``json``: not checked.

Comments before a block change these rules:

* ``<!-- file: train.yaml -->``: write the block to this file in the directory where the page's commands run, next to a copy of
  ``workflow_specs``.
* ``<!-- any order -->``: the lines of the output may have any order, for example if several tasks print them.
* ``<!-- hosts: gpu1 gpu2 -->``: a separate test runs the commands, with SSH hosts of these names.
* ``<!-- screen: NAME 2-3 -->``: ``make screens`` draws the commands 2 and 3 of the block, or without numbers all of them, as
  ``docs/screens/NAME.svg``.
* ``<!-- not run: reason -->``: the commands are not run; the reason is one of ``REASONS``.
* ``<!-- fragment -->``: a part of a spec, which is not validated. ``<!-- not a spec -->``: other YAML, which is only parsed.
  ``<!-- configuration -->``: a ``distflow.yaml``. ``<!-- wrong: message -->``: a spec that is refused with this message.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import yaml

from distflow.testing.sshd import Sshd, make_key
from distflow.testing.waiting import wait_until

__all__ = [
    "LANGUAGES", "LIMIT_S", "NO_VARIABLES", "PAGES", "REASONS", "REPEATABLE", "REPEAT_S", "ROOT", "Block", "Screen", "Shown",
    "Terminal", "all_blocks", "blocks_of", "displayed", "is_as_shown", "screens_of", "shown_in", "ssh_hosts",
]  # fmt: skip

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = {"console", "yaml", "python", "text", "json"}
REASONS = {
    "installs software",
    "trains with torch; tests/scenarios run this spec",
    "runs the whole test suite",
    "takes minutes",
    "changes your shell",
    "needs a git repository",
    "needs GPUs",
    "needs a container engine",
    "needs tensorboard",
    "needs a crash",
    "needs a second machine",
    "needs answers from a terminal",
}
COLUMNS, LINES = 110, 40
LIMIT_S = 120.0
REPEAT_S = 60.0
"""Time limit for repeating a command until it prints the output of the page."""
REPEATABLE = re.compile(r"distflow (workflow )?(query|status|why|list|logs|events|stacks)\b(?!.* (-f|--follow|-w|--watch)\b)")
"""Commands that only read, so they may be repeated."""


# -- the language of the pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    notes: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        """The path of the page and the line of the block."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def note(self, name: str) -> str | None:
        """Return the argument of a comment before the block, ``""`` if it has no argument, ``None`` without such a comment."""
        for note in self.notes:
            word, _, argument = note.partition(":")
            if word == name:
                return argument.strip()
        return None


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of a page, and its output according to the page."""

    block: Block
    command: str
    output: tuple[str, ...]


def blocks_of(page: Path, text: str | None = None) -> Iterator[Block]:
    """Yield the fenced blocks of a page with the comments in front of them."""
    notes: list[str] = []
    language, begin, inside = "", 0, False
    body: list[str] = []
    for number, line in enumerate((text or page.read_text(encoding="utf-8")).split("\n"), 1):
        if inside and line == "```":
            yield Block(page, begin, language, tuple(notes), "".join(f"{one}\n" for one in body))
            inside, notes, body = False, [], []
        elif inside:
            body.append(line)
        elif line.startswith("```"):
            language, begin, inside = line[3:].strip(), number, True
        elif comment := re.fullmatch(r"<!-- (.*) -->", line):
            notes.append(comment.group(1))
        elif line.strip():
            notes = []
    assert not inside, f"{page.name}:{begin}: the block is not closed"


def shown_in(block: Block) -> Iterator[Shown]:
    """Yield the commands of a console block."""
    command: list[str] = []
    output: list[str] = []
    for line in block.text.splitlines():
        if command and command[-1].endswith("\\") and not output:
            command.append(line)
        elif line.startswith("$ "):
            if command:
                yield Shown(block, "\n".join(command), tuple(output))
            command, output = [line.removeprefix("$ ")], []
        else:
            assert command, f"{block.place}: output before the first command"
            output.append(line)
    if command:
        yield Shown(block, "\n".join(command), tuple(output))


@dataclass(frozen=True, slots=True)
class Screen:
    """A picture of some commands of a console block, with their output."""

    name: str
    first: int
    last: int
    """The numbers of its first and last command in the block, counted from 1."""


def screens_of(block: Block) -> Iterator[Screen]:
    """Yield the pictures of a console block."""
    for note in block.notes:
        if match := re.fullmatch(r"screen: ([a-z-]+)(?: (\d+)-(\d+))?", note):
            yield Screen(match[1], int(match[2] or 1), int(match[3] or len(list(shown_in(block)))))


@cache
def all_blocks() -> tuple[Block, ...]:
    """Every block of every page."""
    return tuple(block for page in PAGES for block in blocks_of(page))


# -- comparing the output of a command with the page -------------------------------------------------------------------

_VARYING = (
    (re.compile(r"\b[0-9]{4}/[0-9]{2}/[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\b"), "<second>"),
    (re.compile(r"\b[A-Z][a-z]{2} [0-9]{2}, [0-9]{4} [0-9]{2}:[0-9]{2} [A-Z]+\b"), "<minute>"),
    (re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+\b"), "<time>"),
    (re.compile(r"(?<![\d:])[0-9]{1,2}(:[0-9]{2}){1,2}\b(?![\d:])"), "<elapsed>"),
    (re.compile(r"\bpid [0-9]+"), "pid <n>"),
    (re.compile(r"\b(port |127\.0\.0\.1:)[0-9]{5}\b"), r"\1<n>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<uuid>"),
)
"""Patterns of text that differs from run to run, and the placeholders that replace it."""


def normalize(line: str) -> str:
    """Return a line with placeholders for text that differs from run to run, and then with single spaces."""
    replaced = line
    for pattern, placeholder in _VARYING:
        replaced = pattern.sub(placeholder, replaced)
    if replaced != line or line.startswith("Time   "):  # the header of a table with process ids, which have any width
        replaced = re.sub(r" +", " ", replaced)
    # The rule under a table's header is as long as its longest row.
    return re.sub(r"^={5,}$", "====", replaced.rstrip())


def pattern_of(line: str) -> str:
    """Return a regular expression for one line of a page."""
    return ".*".join(re.escape(piece) for piece in normalize(line).split("…"))


def is_as_shown(expected: tuple[str, ...], printed: str, *, any_order: bool = False) -> bool:
    """Return whether the output of a command matches the page."""
    lines = [normalize(line) for line in printed.rstrip().splitlines()]
    while expected and not expected[-1].strip():
        expected = expected[:-1]
    if any_order:
        wanted = [line for line in expected if line.strip() != "…"]
        for line in wanted:
            found = next((one for one in lines if re.fullmatch(pattern_of(line), one)), None)
            if found is None:
                return False
            lines.remove(found)
        return not lines or len(wanted) < len(expected)
    pieces = (r"(?:[^\n]*\n)*?" if line.strip() == "…" else pattern_of(line) + "\n" for line in expected)
    return re.fullmatch("".join(pieces), "".join(f"{line}\n" for line in lines)) is not None


# -- running commands as on a terminal --------------------------------------------------------------------------------


class Terminal:
    """Runs the commands of a page as on a terminal, in a directory with its own state and configuration."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str] = NO_VARIABLES, programs: str | None = None, **settings: str
    ) -> None:
        """Create the directory below ``folder``.

        ``environment`` has further variables of commands and tasks. ``programs`` is a directory that precedes those in PATH.
        ``settings`` are further settings of the pool ``local``.
        """
        self.folder = folder / "project"
        self.folder.mkdir()
        shutil.copytree(ROOT / "workflow_specs", self.folder / "workflow_specs", ignore=shutil.ignore_patterns("__pycache__"))
        # Pages use `.venv/bin` before they activate the environment.
        (self.folder / ".venv").mkdir()
        (self.folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        self.state = folder / "state"
        # With separate lease directories, pages that run at the same time do not wait for each other's CPUs.
        configuration = folder / ".config" / "distflow"
        configuration.mkdir(parents=True)
        local = {"backend": "local", "lease_dir": f"{folder}/leases", "environment": dict(environment), **settings}
        (configuration / "distflow.yaml").write_text(yaml.safe_dump({"pools": {"local": local}}))
        path = ":".join(filter(None, (programs, str(Path(sys.executable).parent), os.environ["PATH"])))
        self.environment = {
            **os.environ, "PATH": path, "HOME": str(folder), "DISTFLOW_STATE": str(self.state), "USER": "ada", "LOGNAME": "ada",
            "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb", "TZ": "UTC",
            "LC_ALL": "C.UTF-8", **environment,
        }  # fmt: skip
        self._code = 0

    def run(self, command: str) -> tuple[int, str]:
        """Run a command in a shell whose ``$?`` is the exit code of the previous command. Return its exit code and output."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", f"(exit {self._code})\n{command}"], stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
            cwd=self.folder, env=self.environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        data = b""
        try:
            while select.select([master], [], [], LIMIT_S)[0]:
                try:
                    more = os.read(master, 65536)
                except OSError:  # EIO: the last process that used the terminal has ended
                    break
                if not more:
                    break
                data += more
            self._code = process.wait(LIMIT_S)
        finally:
            os.close(master)
            process.kill()
        return self._code, displayed(data.decode("utf-8", "replace"))

    def end(self) -> None:
        """Cancel the workflows that still run, and wait until the supervisor has ended."""
        from distflow.state.directory import StateDirectory
        from distflow.state.store import Store
        from distflow.supervisor.process import is_running

        store = StateDirectory(self.state).store
        if store.exists():
            with Store(store) as opened:
                unfinished = [record.id for record in opened.list(count=1000) if not record.state.is_final]
            if unfinished:
                self.run(f"distflow workflow cancel --force --wait 60 {' '.join(unfinished)}")
        wait_until(lambda: not is_running(StateDirectory(self.state)), 60)


def displayed(text: str) -> str:
    """Return the text as a terminal shows it: of a line that was overwritten, only the last text."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(re.split(r"\r(?:\x1b\[K)?", line)[-1] for line in lines)


# -- machines for pages that need them --------------------------------------------------------------------------------


@contextmanager
def ssh_hosts(
    home: Path, names: list[str], prefix: Callable[[str], Sequence[str]] = lambda _: (), **variables: str
) -> Iterator[None]:
    """Start an OpenSSH server for each name, which `ssh NAME` reaches with the configuration in `home`.

    For each name, `prefix` returns words that precede the command of its server. `variables` are set on all hosts.
    """
    more = "".join(f" {name}={value}" for name, value in variables.items())
    key = make_key(home / "key")
    with ExitStack() as stack:
        stanzas = []
        for number, name in enumerate(names, 1):
            # `python3` on the hosts is the Python of the tests, which has torch.
            environment = f"HOME={home / name / 'home'} PATH={Path(sys.executable).parent}:/usr/bin:/bin{more}"
            server = Sshd(
                home / name, f"127.0.3.{number}", alias=name, user_key=key, options={"SetEnv": environment}, prefix=prefix(name)
            )
            stanzas.append(stack.enter_context(server).client_stanza())
        (home / ".ssh").mkdir(mode=0o700)
        (home / ".ssh" / "config").write_text("".join(stanzas))
        yield
