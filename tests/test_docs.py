"""What README and docs/ show is true: links lead somewhere, specs are valid, commands print the lines below them.

The language of the pages, all in fenced blocks:

* ``console``: a line that begins with ``$ `` is run (``\\`` at its end continues it in the next line); the lines below it are
  the output in a terminal, standard output and error together. ``…`` stands for anything within a line, and alone on a line for
  any lines. A command must exit with 0, unless the next one asks for ``$?``. Commands that only look (``query``, ``why``,
  ``list``, ``logs``, ``events``) are asked again until they say so.
* ``yaml``: a spec, which ``distflow workflow validate`` accepts.
* ``python``: a script when it has a name (``file``), run by the commands of its page; else a fragment, which compiles.
* ``text`` and ``json``: not checked.

A comment before a block says more: ``<!-- file: train.yaml -->`` puts it into the page's directory, where its commands run
next to a copy of ``workflow_specs``; ``<!-- any order -->`` is for lines of several tasks;
``<!-- hosts: gpu1 gpu2 -->`` is for commands that need machines behind SSH: a test of their own runs them, with such hosts;
``<!-- not run: reason -->`` (one of ``REASONS``), ``<!-- fragment -->``, ``<!-- not a spec -->``, ``<!-- wrong: message -->``
and ``<!-- configuration -->`` take a block out of the rule, or put it under another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from distflow.testing.sshd import Sshd, make_key, missing_sshd
from distflow.testing.waiting import wait_until
from preloaded import forking_site

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = {"console", "yaml", "python", "text", "json"}
REASONS = {
    "installs software",
    "trains with torch; tests/scenarios run this spec",
    "runs the whole test suite",
    "takes minutes",
    "changes your shell",
    "needs a git repository",
    "needs a container engine",
    "needs tensorboard",
    "needs a crash",
    "needs a second machine",
    "needs a gang that hangs",
    "needs answers from a terminal",
}
COLUMNS, LINES = 110, 40
LIMIT_S = 120.0
LOOK_S = 60.0
LOOKS = re.compile(r"distflow workflow (query|why|list|logs|events)\b(?!.*( -f\b| --follow\b| -w\b| --watch\b))")


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
    if passed != line:
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

    def __init__(self, folder: Path) -> None:
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
        (settings / "distflow.yaml").write_text(f"pools: {{local: {{backend: local, lease_dir: {folder}/leases}}}}\n")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **os.environ, "PATH": path, "HOME": str(folder), "DISTFLOW_STATE": str(self.state), "USER": "ada", "LOGNAME": "ada",
            "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb", "TZ": "UTC",
            "LC_ALL": "C.UTF-8",
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


# -- the pages --------------------------------------------------------------------------------------------------------


def _is_run_here(block: Block) -> bool:
    return block.note("not run") is None and block.note("hosts") is None


def _with_commands() -> list[Path]:
    run = {block.page for block in all_blocks() if block.language == "console" and _is_run_here(block)}
    return [page for page in PAGES if page in run]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _with_commands(), ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    if page.name in ("training.md", "strategies.md"):
        terminal.environment["PYTHONPATH"] = forking_site(tmp_path)
    _run_page(terminal, [block for block in all_blocks() if block.page == page and _is_run_here(block)])


@pytest.mark.ssh
@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [block for block in all_blocks() if block.note("hosts")], ids=lambda block: block.place)
def test_commands_do_on_ssh_hosts_what_the_page_shows(block: Block, tmp_path: Path) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    terminal = Terminal(tmp_path)
    key = make_key(tmp_path / "key")
    with ExitStack() as stack:
        stanzas = []
        for number, name in enumerate(str(block.note("hosts")).split(), 1):
            home = tmp_path / name / "home"
            # What `python3` is there: one that has torch, as on the machines that people train on.
            environment = f"HOME={home} PATH={Path(sys.executable).parent}:/usr/bin:/bin"
            server = Sshd(tmp_path / name, f"127.0.3.{number}", alias=name, user_key=key, options={"SetEnv": environment})
            stanzas.append(stack.enter_context(server).client_stanza())
        (tmp_path / ".ssh").mkdir(mode=0o700)
        (tmp_path / ".ssh" / "config").write_text("".join(stanzas))
        files = [one for one in all_blocks() if one.page == block.page and one.language != "console"]
        _run_page(terminal, [*files, block])


def _run_page(terminal: Terminal, blocks: list[Block]) -> None:
    try:
        for block in blocks:
            name = block.note("file")
            if name:
                (terminal.folder / name).write_text(block.text)
            if block.language == "console":
                _run_block(terminal, block)
    finally:
        terminal.end()


def _run_block(terminal: Terminal, block: Block) -> None:
    any_order = block.note("any order") is not None
    commands = list(shown_in(block))
    for position, shown in enumerate(commands):
        printed, code = "", 0

        def is_right(shown: Shown = shown) -> bool:
            nonlocal printed, code
            code, printed = terminal.run(shown.command)
            return not shown.output or is_as_shown(shown.output, printed, any_order=any_order)

        right = is_right()
        if not right and LOOKS.match(shown.command):
            with contextlib.suppress(TimeoutError):
                right = wait_until(is_right, LOOK_S)
        is_asked = position + 1 < len(commands) and "$?" in commands[position + 1].command
        if not right or (code and not is_asked):
            expected = "\n".join(shown.output)
            pytest.fail(
                f"{block.place}: $ {shown.command}\n\n-- the page shows --\n{expected}\n\n"
                f"-- it printed, and ended with {code} --\n{printed}",
                pytrace=False,
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_specs_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distflow.cli.app import run
    from distflow.pools.load import parse_configuration, this_machine

    shutil.copytree(ROOT / "workflow_specs", tmp_path / "workflow_specs")
    monkeypatch.chdir(tmp_path)
    for block in all_blocks():
        if block.page == page and block.note("file"):
            (tmp_path / str(block.note("file"))).write_text(block.text)
    for block in all_blocks():
        if block.page != page or block.language != "yaml" or block.note("fragment") is not None:
            continue
        yaml_text = block.text
        if block.note("not a spec") is not None:
            yaml.safe_load(yaml_text)
            continue
        if block.note("configuration") is not None or block.note("file") == "distflow.yaml":
            parse_configuration(yaml_text, block.place, root="/tmp/node", machine=this_machine())
            continue
        (tmp_path / "shown.yaml").write_text(yaml_text)
        code = run(["workflow", "validate", "shown.yaml"])
        said = capsys.readouterr()
        wrong = block.note("wrong")
        if wrong is None:
            assert code == 0, f"{block.place}\n{said.err}"
        else:
            assert code == 2, block.place
            assert wrong in said.err, f"{block.place}\n{said.err}"


def test_blocks_are_of_a_kind_that_is_looked_at() -> None:
    for block in all_blocks():
        assert block.language in LANGUAGES, f"{block.place}: `{block.language}`"
        assert bool(block.note("not run")) == (block.note("not run") is not None), f"{block.place}: no reason"
        assert block.note("not run") in (None, *REASONS), f"{block.place}: not an agreed reason: {block.note('not run')}"
        if block.language == "console":
            for shown in shown_in(block):
                # Each command has a shell of its own.
                assert not re.match(r"(cd|export|alias|source) ", shown.command), f"{block.place}: {shown.command}"
        if block.language == "python":
            compile(block.text, block.place, "exec")
        if block.language == "text":
            assert not block.text.startswith("$ "), f"{block.place}: a command that is not run"


def test_there_are_commands_and_specs() -> None:
    commands = [shown for block in all_blocks() if block.language == "console" for shown in shown_in(block)]
    run = [shown for shown in commands if shown.block.note("not run") is None]
    assert len(run) > 30
    assert sum(bool(shown.output) for shown in run) > 20
    assert sum(block.language == "yaml" and block.note("fragment") is None for block in all_blocks()) > 8


# -- words in the text ------------------------------------------------------------------------------------------------


def _prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def _slugger() -> ModuleType:
    description = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules["generate_docs"] = module
    description.loader.exec_module(module)
    return module


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page; a repeated one gets a number."""
    seen_before: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _prose(page), re.MULTILINE):
        slug: str = _slugger().slug(heading)
        count = seen_before.get(slug, 0)
        seen_before[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert there.is_relative_to(ROOT), f"{page.name}: {target} leaves the repository"
        assert not anchor or anchor in anchors_of(there), f"{page.name}: {target}: no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [
        page.name for page in PAGES if page.parent == ROOT / "docs" and page.name != "README.md" and page.name not in index
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_named_in_the_text_exist(page: Path) -> None:
    for words in re.findall(r"`distflow ((?:[a-z]+ ?)+[^`\n]*)`", _prose(page)):
        subject, options = _help_of(tuple(words.split()))
        named = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", words))
        assert named <= options, f"{page.name}: `distflow {words}`: {subject} has no {sorted(named - options)}"


NOT_MODULES = {"yaml", "sqlite3", "attempt"}
"""Endings of file names and labels that look like modules of distflow."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_files_named_on_the_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in re.findall(r"(?<![\w./-])distflow(?:\.[A-Za-z_]\w*)+", text) if not _is_module_or_member(name)]
    is_about_code = page.name == "architecture.md"
    for path in re.findall(r"`([\w.-]+(?:/[\w.-]*)*)`", _prose(page)):
        if path.endswith(".py") and ("/" in path or path.startswith("test_") or is_about_code):
            tops = (ROOT, ROOT / "src" / "distflow", ROOT / "tests")
            found = any((top / path).exists() for top in tops) or ("/" not in path and any((ROOT / "tests").rglob(path)))
        elif path.endswith("/") and is_about_code:
            found = any((top / path).is_dir() for top in (ROOT, ROOT / "src" / "distflow"))
        else:
            continue
        if not found:
            missing.append(path)
    assert not missing


def _is_module_or_member(name: str) -> bool:
    """Return whether a dotted name is a module of distflow, or a name that such a module contains."""
    parts = name.split(".")
    if parts[1] in NOT_MODULES:
        return True
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath("src", *parts[:length])
        for module in (place.with_suffix(".py"), place / "__init__.py"):
            if module.exists():
                member = parts[length] if length < len(parts) else ""
                return length > 1 and re.search(rf"\b{member}\b", module.read_text(encoding="utf-8")) is not None
    return False


def test_the_drawing_of_floors_shows_every_package() -> None:
    drawing = next(block.text for block in all_blocks() if block.page.name == "architecture.md" and "│  cli" in block.text)
    rows = re.findall(r"^ [│▼]  (\w+) *([┐│┘]?)(.*)$", drawing, re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    assert [name for name, _, _ in rows] == [name for layer in layers[1:] for name in layer.split(" | ")]
    assert {name for name, bracket, _ in rows if bracket} == {
        name for layer in layers[1:] if "|" in layer for name in layer.split(" | ")
    }
    for name, _, text in rows:
        packages = {path.parent.name for path in (ROOT / "src" / "distflow" / name).rglob("*/__init__.py")} - {name}
        assert packages <= set(re.findall(r"\w+", text)), name


@cache
def _help_of(words: tuple[str, ...]) -> tuple[str, set[str]]:
    """Return the command that words begin with, and its options. Fails for a command that does not exist."""
    import typer

    from distflow.cli.app import app

    command: Any = typer.main.get_command(app)
    named = ["distflow"]
    for word in words:
        if word.startswith("-") or not hasattr(command, "get_command"):
            break
        found = command.get_command(command.context_class(command), word)
        assert found is not None, f"`{' '.join(named)} {word}` is not a command"
        command = found
        named.append(word)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return " ".join(named), {*options, "--help"}


# -- the judge itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        (("a b c",), "a b c\n", True),
        (("a b c",), "a b d\n", False),
        (("a",), "a\nb\n", False),
        (("a", "b"), "a\n", False),
        (("a … c",), "a b c\n", True),
        (("a … c",), "a b\nx c\n", False),
        (("a", "…", "c"), "a\nb\nb\nc\n", True),
        (("a", "…", "c"), "a\nc\n", True),
        (("a", "…"), "b\na\n", False),
        (("Elapsed  0:05",), "Elapsed  1:12:40\n", True),
        (("Status  FAILED   0:05",), "Status  COMPLETED  0:05\n", False),
        (("started (pid 12)",), "started (pid 99999)\n", True),
        (("  indented",), "indented\n", False),
        (("2026/01/01 10:00:00 x",), "2027/02/03 11:12:13 x\n", True),
    ],
)
def test_output_is_compared(expected: tuple[str, ...], printed: str, *, right: bool) -> None:
    assert is_as_shown(expected, printed) is right


def test_lines_in_any_order_are_all_wanted() -> None:
    assert is_as_shown(("a", "b"), "b\na\n", any_order=True)
    assert not is_as_shown(("a", "a"), "a\nb\n", any_order=True)
    assert not is_as_shown(("a",), "a\nb\n", any_order=True)
    assert is_as_shown(("a", "…"), "b\na\n", any_order=True)


def test_a_terminal_shows_the_last_text_of_a_line() -> None:
    assert (
        seen("x-1\r\nx-1 PENDING\r\x1b[K[a] hello\r\nx-1 RUNNING\r\x1b[Kx-1 COMPLETED\r\n") == "x-1\n[a] hello\nx-1 COMPLETED\n"
    )


def test_blocks_are_read_with_their_comments() -> None:
    text = "<!-- file: a.yaml -->\n\n```yaml\na: 1\n```\ntext\n```console\n$ one \\\n  two\nout\n$ three\n```\n"
    first, second = blocks_of(PAGES[0], text)
    assert (first.note("file"), first.text, first.note("fragment")) == ("a.yaml", "a: 1\n", None)
    assert [(shown.command, shown.output) for shown in shown_in(second)] == [("one \\\n  two", ("out",)), ("three", ())]
    assert second.notes == ()


def test_a_wrong_page_is_found(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    for text, right in (("$ echo hello\nhello\n", True), ("$ echo hello\ngoodbye\n", False), ("$ exit 3\n", False)):
        block = Block(PAGES[0], 1, "console", (), text)
        if right:
            _run_block(terminal, block)
        else:
            with pytest.raises(pytest.fail.Exception):
                _run_block(terminal, block)
    _run_block(terminal, Block(PAGES[0], 1, "console", (), "$ (exit 3)\n$ echo $?\n3\n"))


def test_pages_that_run_side_by_side_share_no_leases(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = Terminal(tmp_path / "one"), Terminal(tmp_path / "other")
    spec = "workflow: {name: holds, resources: {default: {cpu: 1}}, tasks: [{name: a, command: [sleep, '600']}]}\n"
    (one.folder / "holds.yaml").write_text(spec)
    try:
        assert one.run("distflow workflow submit holds.yaml")[0] == 0
        wait_until(lambda: "holds-1/a" in one.run("distflow resource list --live")[1], LOOK_S)
        assert "Nothing is in use on these nodes" in other.run("distflow resource list --live")[1]
    finally:
        one.end()
