"""The pages of the documentation: their fenced blocks, and whether a command printed what a page shows.

The language of the pages, all in fenced blocks:

* ``console``: a line that begins with ``$ `` is run (``\\`` at its end continues it in the next line); the lines below it are
  the output in a terminal, standard output and error together. ``…`` stands for anything within a line, and alone on a line for
  any lines. A command must exit with 0, unless the next one asks for ``$?``. Commands that only look (``query``, ``why``,
  ``stacks``, ``list``, ``logs``, ``events``) are asked again until they say so.
* ``yaml``: a spec, which ``distflow workflow validate`` accepts.
* ``python``: a script when it has a name (``file``), run by the commands of its page; else a fragment, which compiles.
* ``text`` and ``json``: not checked.

A comment before a block says more: ``<!-- file: train.yaml -->`` puts it into the page's directory, where its commands run
next to a copy of ``workflow_specs``; ``<!-- any order -->`` is for lines of several tasks;
``<!-- hosts: gpu1 gpu2 -->`` is for commands that need machines behind SSH: a test of their own runs them, with such hosts;
``<!-- screen: NAME 2-3 -->`` makes ``make screens`` draw the second and the third command of the block, or without numbers all
of them, as ``docs/screens/NAME.svg``; ``<!-- not run: reason -->`` (one of ``REASONS``), ``<!-- fragment -->``,
``<!-- not a spec -->``, ``<!-- wrong: message -->`` and ``<!-- configuration -->`` take a block out of the rule, or put it
under another one.
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
    "LANGUAGES", "LIMIT_S", "LOOKS", "LOOK_S", "NOTHING", "PAGES", "REASONS", "ROOT", "Block", "Screen", "Shown", "Terminal",
    "all_blocks", "blocks_of", "is_as_shown", "screens_of", "seen", "shown_in", "ssh_hosts",
]  # fmt: skip

NOTHING: Mapping[str, str] = MappingProxyType({})
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
LOOK_S = 60.0
LOOKS = re.compile(r"distflow (workflow )?(query|status|why|list|logs|events|stacks)\b(?!.* (-f|--follow|-w|--watch)\b)")


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
        """Where a person finds it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def note(self, name: str) -> str | None:
        """The argument of one of its comments, ``""`` when it has none; ``None`` without the comment."""
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


# -- comparing what is shown with what is printed ---------------------------------------------------------------------

_PASSING = (
    (re.compile(r"\b[0-9]{4}/[0-9]{2}/[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\b"), "<second>"),
    (re.compile(r"\b[A-Z][a-z]{2} [0-9]{2}, [0-9]{4} [0-9]{2}:[0-9]{2} [A-Z]+\b"), "<minute>"),
    (re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+\b"), "<time>"),
    (re.compile(r"(?<![\d:])[0-9]{1,2}(:[0-9]{2}){1,2}\b(?![\d:])"), "<elapsed>"),
    (re.compile(r"\bpid [0-9]+"), "pid <n>"),
    (re.compile(r"\b(port |127\.0\.0\.1:)[0-9]{5}\b"), r"\1<n>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<uuid>"),
)
"""What differs from run to run, and what stands for it."""


def normal(line: str) -> str:
    """Return a line without what differs from run to run; its columns then do not count."""
    passed = line
    for pattern, word in _PASSING:
        passed = pattern.sub(word, passed)
    if passed != line or line.startswith("Time   "):  # the header of a table with process ids, which have any width
        passed = re.sub(r" +", " ", passed)
    # The rule under a table's header is as long as its longest row.
    return re.sub(r"^={5,}$", "====", passed.rstrip())


def pattern_of(line: str) -> str:
    """Return a regular expression for one line of a page."""
    return ".*".join(re.escape(piece) for piece in normal(line).split("…"))


def is_as_shown(expected: tuple[str, ...], printed: str, *, any_order: bool = False) -> bool:
    """Tell whether a command printed what the page shows."""
    lines = [normal(line) for line in printed.rstrip().splitlines()]
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
    """The directory in which a page's commands run, and what runs them."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = NOTHING) -> None:
        """With ``environment``, commands and tasks have more variables."""
        self.folder = folder / "project"
        self.folder.mkdir()
        shutil.copytree(ROOT / "workflow_specs", self.folder / "workflow_specs", ignore=shutil.ignore_patterns("__pycache__"))
        # README's first command is typed before the environment is activated.
        (self.folder / ".venv").mkdir()
        (self.folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        self.state = folder / "state"
        # Pages that run side by side do not share this machine's CPUs, and see nothing of one another.
        settings = folder / ".config" / "distflow"
        settings.mkdir(parents=True)
        local = {"backend": "local", "lease_dir": f"{folder}/leases", "environment": dict(environment)}
        (settings / "distflow.yaml").write_text(yaml.safe_dump({"pools": {"local": local}}))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **os.environ, "PATH": path, "HOME": str(folder), "DISTFLOW_STATE": str(self.state), "USER": "ada", "LOGNAME": "ada",
            "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb", "TZ": "UTC",
            "LC_ALL": "C.UTF-8", **environment,
        }  # fmt: skip
        self._code = 0

    def run(self, command: str) -> tuple[int, str]:
        """Run a command in a shell that knows the exit code of the one before; return its own, and what was to be seen."""
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
                except OSError:  # Linux says EIO when the last process that had the terminal is gone
                    break
                if not more:
                    break
                data += more
            self._code = process.wait(LIMIT_S)
        finally:
            os.close(master)
            process.kill()
        return self._code, seen(data.decode("utf-8", "replace"))

    def end(self) -> None:
        """End the processes that the page left, and wait until none works in the directory."""
        from distflow.state.directory import StateDirectory
        from distflow.supervisor.process import is_running

        if not self.state.exists():
            return
        distflow = "distflow workflow"
        self.run(f"{distflow} list -c 1000 -s PENDING -s RUNNING -t json | grep '\"name\"' | cut -d'\"' -f4 > left")
        left = (self.folder / "left").read_text().split()
        if left:
            self.run(f"{distflow} cancel --force --wait 60 {' '.join(left)}")
        wait_until(lambda: not is_running(StateDirectory(self.state)), 60)


def seen(text: str) -> str:
    """Return what is left on a terminal: a line that was cleared and written again shows its last text."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(re.split(r"\r(?:\x1b\[K)?", line)[-1] for line in lines)


# -- machines for pages that need them --------------------------------------------------------------------------------


@contextmanager
def ssh_hosts(
    home: Path, names: list[str], prefix: Callable[[str], Sequence[str]] = lambda _: (), **variables: str
) -> Iterator[None]:
    """Start an OpenSSH server for each name, which `ssh NAME` reaches with the configuration in `home`.

    `prefix` returns what comes before the command of the server of a name. `variables` are set on all of them.
    """
    more = "".join(f" {name}={value}" for name, value in variables.items())
    key = make_key(home / "key")
    with ExitStack() as stack:
        stanzas = []
        for number, name in enumerate(names, 1):
            # What `python3` is there: one that has torch, as on the machines that people train on.
            environment = f"HOME={home / name / 'home'} PATH={Path(sys.executable).parent}:/usr/bin:/bin{more}"
            server = Sshd(
                home / name, f"127.0.3.{number}", alias=name, user_key=key, options={"SetEnv": environment}, prefix=prefix(name)
            )
            stanzas.append(stack.enter_context(server).client_stanza())
        (home / ".ssh").mkdir(mode=0o700)
        (home / ".ssh" / "config").write_text("".join(stanzas))
        yield
