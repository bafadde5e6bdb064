"""README and docs/ are correct: links have targets, specs are valid, and commands print the output on the page.

`pages` describes the blocks and comments of the pages.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import distflow
from distflow.testing.sshd import missing_sshd
from distflow.testing.waiting import wait_until
from pages import (
    LANGUAGES,
    NO_VARIABLES,
    PAGES,
    REASONS,
    REPEAT_S,
    REPEATABLE,
    ROOT,
    Block,
    Shown,
    Terminal,
    all_blocks,
    blocks_of,
    displayed,
    is_as_shown,
    screens_of,
    shown_in,
    ssh_hosts,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAINING = ("launch.md", "pytorch-examples.md", "strategies.md", "training.md")
"""Pages whose scripts and tasks use `forking_site`. The page about `stacks` must show the processes of a normal node."""

# -- the pages --------------------------------------------------------------------------------------------------------


def _runs_locally(block: Block) -> bool:
    return block.note("not run") is None and block.note("hosts") is None


def _pages_with_commands() -> list[Path]:
    run = {block.page for block in all_blocks() if block.language == "console" and _runs_locally(block)}
    return [page for page in PAGES if page in run]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _pages_with_commands(), ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    site = {"PYTHONPATH": request.getfixturevalue("forking_site")} if page.name in TRAINING else NO_VARIABLES
    programs = None if page.name == "README.md" else request.getfixturevalue("forking_programs")
    if page.name == "python.md":
        _write_python(str(programs))
    # Without torch, whose import takes seconds. README also runs `pool check`, with torch.
    settings = {"python": str(getattr(sys, "_base_executable", sys.executable))} if page.name == "pool-check.md" else {}
    terminal = Terminal(tmp_path, site, programs, **settings)
    _run_page(terminal, [block for block in all_blocks() if block.page == page and _runs_locally(block)])


def _write_python(programs: str) -> None:
    """Write a ``python`` next to the forked ``distflow``. It forks the programs of a page in the same way."""
    distflow_program = Path(programs) / "distflow"
    text = distflow_program.read_text()
    assert '"-m", "distflow", *' in text
    python = distflow_program.with_name("python")
    python.write_text(text.replace('"-m", "distflow", *', "*"))
    python.chmod(0o755)


@pytest.mark.ssh
@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [block for block in all_blocks() if block.note("hosts")], ids=lambda block: block.place)
def test_commands_do_on_ssh_hosts_what_the_page_shows(
    block: Block, tmp_path: Path, forking_site: str, forking_programs: str
) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    terminal = Terminal(tmp_path, programs=forking_programs)
    with ssh_hosts(tmp_path, str(block.note("hosts")).split(), PYTHONPATH=forking_site):
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

        def prints_the_page(shown: Shown = shown) -> bool:
            nonlocal printed, code
            code, printed = terminal.run(shown.command)
            return not shown.output or is_as_shown(shown.output, printed, any_order=any_order)

        is_right = prints_the_page()
        if not is_right and REPEATABLE.match(shown.command):
            with contextlib.suppress(TimeoutError):
                is_right = wait_until(prints_the_page, REPEAT_S)
        may_fail = position + 1 < len(commands) and "$?" in commands[position + 1].command
        if not is_right or (code and not may_fail):
            expected = "\n".join(shown.output)
            pytest.fail(
                f"{block.place}: $ {shown.command}\n\n-- the page shows --\n{expected}\n\n"
                f"-- the command exited with code {code} and printed --\n{printed}",
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
        errors = capsys.readouterr().err
        wrong = block.note("wrong")
        if wrong is None:
            assert code == 0, f"{block.place}\n{errors}"
        else:
            assert code == 2, block.place
            assert wrong in errors, f"{block.place}\n{errors}"


def test_blocks_have_known_languages_and_valid_notes() -> None:
    for block in all_blocks():
        assert block.language in LANGUAGES, f"{block.place}: `{block.language}`"
        assert bool(block.note("not run")) == (block.note("not run") is not None), f"{block.place}: no reason"
        assert block.note("not run") in (None, *REASONS), f"{block.place}: not an agreed reason: {block.note('not run')}"
        if block.language == "console":
            for shown in shown_in(block):
                # Each command runs in a new shell, so these would have no effect.
                assert not re.match(r"(cd|export|alias|source) ", shown.command), f"{block.place}: {shown.command}"
        if block.language == "python":
            compile(block.text, block.place, "exec")
        if block.language == "text":
            assert not block.text.startswith("$ "), f"{block.place}: a command that is not run"


def test_pages_have_many_commands_and_specs() -> None:
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
def _script(name: str) -> ModuleType:
    description = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module
    description.loader.exec_module(module)
    return module


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page; a repeated one gets a number."""
    counts: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _prose(page), re.MULTILINE):
        slug: str = _script("generate_docs").slug(heading)
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert linked.is_relative_to(ROOT), f"{page.name}: {target} leaves the repository"
        assert not anchor or anchor in anchors_of(linked), f"{page.name}: {target}: no such heading"


def test_the_examples_of_the_python_api_have_correct_types(tmp_path: Path) -> None:
    for block in blocks_of(ROOT / "docs" / "python.md"):
        if block.language == "python":
            (tmp_path / (block.note("file") or "")).write_text(block.text)
    # As in a user's directory, distflow is an installed package. The examples use no types of the packages below, and to
    # follow them would take most of the time.
    skipped = ("torch", *(f"distflow.{name}" for name in ("backends", "runtime", "storage", "supervisor", "train")))
    sections = f"[mypy-{','.join(f'{name}.*' for name in skipped)}]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\ncache_dir = {os.devnull}\n{sections}")
    mypy: list[str | Path] = [sys.executable, "-m", "mypy", *tmp_path.glob("*.py")]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "5 source files" in done.stdout


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [
        page.name for page in PAGES if ROOT / "docs" in page.parents and page.name != "README.md" and page.name not in index
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
                known = dir(distflow) if length == 1 else re.findall(r"\w+", module.read_text(encoding="utf-8"))
                return not member or member in known
    return False


def test_the_drawing_of_layers_shows_every_package() -> None:
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
    """Return the command at the beginning of ``words``, and its options. Fails if the command does not exist."""
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


# -- the pictures -----------------------------------------------------------------------------------------------------


def _text_of_picture(path: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8"))).replace("\xa0", " ")


def test_pictures_show_the_commands_of_their_pages() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    drawn = {path.stem: path for path in (ROOT / "docs" / "screens").glob("*.svg")}
    screens = {screen.name: (block, screen) for block in all_blocks() for screen in screens_of(block)}
    assert sorted(screens) == sorted(drawn)
    for name, (block, screen) in screens.items():
        assert f"screens/{name}.svg)" in text, f"no page shows {name}.svg"
        assert drawn[name].stat().st_size < 60_000
        assert "url(" not in drawn[name].read_text(encoding="utf-8").replace("url(#", ""), "loads something from elsewhere"
        picture = re.sub(r"\s", "", _text_of_picture(drawn[name]))
        for shown in list(shown_in(block))[screen.first - 1 : screen.last]:
            typed = re.sub(r"\s", "", f"$ {shown.command}")
            assert typed in picture, f"{name}.svg does not show `{shown.command}`: run `make screens`"


def test_commands_are_typed_and_drawn(tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux not found: apt-get install tmux")
    page = (
        "<!-- screen: red 2-2 -->\n```console\n$ echo one\none\n$ printf '\\e[31mred\\e[0m at %s\\n' $HOME\n"
        "red at …\n$ echo three\nfour\n```\n"
    )
    drawn: dict[str, str] = {}
    wrong = _script("screens").play(list(blocks_of(PAGES[0], page)), tmp_path, drawn.__setitem__)
    assert [text.split("\n")[1:] for text in wrong] == [["three", "(exit code 0)"]]
    assert drawn["red"].endswith("\n\x1b[31mred\x1b[39m at /home/ada")
    (tmp_path / "red.svg").write_text(_script("screens").svg("red", drawn["red"]))
    assert "red at /home/ada" in _text_of_picture(tmp_path / "red.svg")


# -- the comparison itself --------------------------------------------------------------------------------------------


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


def test_in_any_order_each_line_is_required() -> None:
    assert is_as_shown(("a", "b"), "b\na\n", any_order=True)
    assert not is_as_shown(("a", "a"), "a\nb\n", any_order=True)
    assert not is_as_shown(("a",), "a\nb\n", any_order=True)
    assert is_as_shown(("a", "…"), "b\na\n", any_order=True)


def test_a_terminal_shows_the_last_text_of_a_line() -> None:
    assert (
        displayed("x-1\r\nx-1 PENDING\r\x1b[K[a] hello\r\nx-1 RUNNING\r\x1b[Kx-1 COMPLETED\r\n")
        == "x-1\n[a] hello\nx-1 COMPLETED\n"
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


def test_pages_that_run_at_the_same_time_share_no_leases(tmp_path: Path, forking_programs: str) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = (Terminal(tmp_path / name, programs=forking_programs) for name in ("one", "other"))
    spec = "workflow: {name: holds, resources: {default: {cpu: 1}}, tasks: [{name: a, command: [sleep, '600']}]}\n"
    (one.folder / "holds.yaml").write_text(spec)
    try:
        assert one.run("distflow workflow submit holds.yaml")[0] == 0
        wait_until(lambda: "holds-1/a" in one.run("distflow resource list --live")[1], REPEAT_S)
        assert "Nothing is in use on these nodes" in other.run("distflow resource list --live")[1]
    finally:
        one.end()
