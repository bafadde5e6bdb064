"""Check the English of docs, docstrings, comments and strings (`make lint`).

The script prints each phrase that makes a text hard to read, with its file, line and replacement. codespell checks the
(American) spelling.

`[tool.distflow-prose]` in pyproject.toml lists unchecked files. The script does not check text between backticks: use them for
code, and for correct words that a rule forbids.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CHECKED = (
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "docs",
    "workflow_specs",
    "src",
    "scripts",
    "benchmarks",
    "tests",
)
SUFFIXES = {".md": "markdown", ".py": "python", ".json": "text", ".yaml": "text", ".sh": "text"}

_TO_BE = "(?:is|are|was|were|be|been|being)"
RULES = {
    r"anew|once more": "again",
    r"beside": "next to, alongside",
    r"besides": "in addition to",
    rf"{_TO_BE} told": "is reported, gets",
    r"tells? of|telling of": "reports",
    r"give or take": "±",
    r"any ?more": "no longer",
    rf"{_TO_BE} no (?!longer|more|less|fewer)\w+": "is not a",
    r"so many|so that it is": "n, which makes it",
    r"go(?:es|ing|ne)? on|went on": "continues",
    r"go(?:es|ing)? by": "is ignored, elapses",
    r"at work|(?:is|are|was) at it": "running, active",
    r"c[oa]mes? to be|bec[oa]mes? of": "happens, results in",
    r"look(?:s|ed|ing)? (?:after|at)": "maintain, inspect, check",
    r"signs? of life": "responds, makes progress",
    r"out of reach": "unreachable",
    r"for want of": "for lack of",
    r"for ever": "forever",
    r"in the manner of": "in the style of, like",
    r"nobody|whoever|who waits|that which": "the noun: no user, waiting tasks",
    r"what (?:a|an|the|its|their|another|each) \w+ (?:wrote|printed|said|says|told|tells|asked|left|sent)": (
        "the noun: the task's output"
    ),
    r"stands? (?:in|there|here|below|above|beside|under)": "is in",
    r"held? against": "checked against",
    r"take[sn]? up where": "continued where",
    r"in turns": "alternately",
    r"last words": "last lines, last message",
    r"truth value": "Boolean",
    r"shall": "must, will",
    r"in vain": "without success",
    r"without a word": "without a message",
    r"gives? way": "yields",
    r"hitherto|henceforth|hence|whence|thence|thereof|thereby|therein|wherein|whereof|whereupon": "the everyday word",
    r"upon|unto|till|lest|ere|aught|likewise|amid|amidst|whilst|amongst|afresh": "the everyday word",
}
_PHRASE = re.compile(r"\b(?:" + "|".join(f"({rule})" for rule in RULES).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
_GENERATED = re.compile(r"<!-- generated: ([a-z-]+).*?<!-- end of \1 -->", re.DOTALL)
_FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"(`+)[^`\n]+\1")


def blank(pattern: re.Pattern[str], text: str) -> str:
    """Replace the characters of each match by backticks, so that all other characters keep their positions."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", "`", match[0]), text)


def pieces_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the pieces of prose in a file, each with the number of its first line."""
    text = path.read_text(encoding="utf-8")
    kind = SUFFIXES[path.suffix]
    if kind == "python":
        if _PHRASE.search(re.sub(r"\n *# ?", "\n", text)):  # tokenizing is slower, and most files have no such phrase
            yield from _python(text)
    elif kind == "markdown":
        yield 1, blank(_QUOTED, blank(_FENCED, blank(_GENERATED, text)))
    else:
        yield 1, blank(_QUOTED, text)


def _python(text: str) -> Iterator[tuple[int, str]]:
    """Yield strings and comments. Comments on consecutive lines are one piece."""
    begin, comment = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comment and begin + comment.count("\n") + 1 == token.start[0]:
                comment += "\n" + token.string.lstrip("# ")
                continue
            if comment:
                yield begin, blank(_QUOTED, comment)
            begin, comment = token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield token.start[0], blank(_QUOTED, token.string)
    if comment:
        yield begin, blank(_QUOTED, comment)


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the text and the remedy of each phrase that breaks a rule."""
    remedies = list(RULES.values())
    for begin, text in pieces_of(path):
        for match in _PHRASE.finditer(text):
            if not text[: match.start()].rstrip().lower().endswith("there"):  # "there is no pool" is plain English
                phrase = " ".join(match[0].split())
                yield begin + text.count("\n", 0, match.start()), phrase, remedies[int(match.lastindex or 1) - 1]


def files(skipped: list[str]) -> list[Path]:
    """Return the files to check: those below `CHECKED` with a suffix of `SUFFIXES`, except those below a skipped path."""
    found = []
    for name in CHECKED:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            relative = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and not any(relative == part or relative.startswith(f"{part}/") for part in skipped):
                found.append(path)
    return found


def main() -> int:
    """Print all findings of the rules and of codespell. Return 1 if there are any, else 0."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["distflow-prose"]
    checked = files(settings["unchecked"])
    found = 0
    for path in checked:
        for line, phrase, remedy in findings(path):
            print(f"{path.relative_to(ROOT)}:{line}: `{phrase}`: write {remedy}")
            found += 1
    if found:
        print(f"{found} phrase{'s' * (found > 1)} to improve. [tool.distflow-prose] in pyproject.toml lists unchecked files.")
    codespell = [str(Path(sys.executable).with_name("codespell")), *(str(path.relative_to(ROOT)) for path in checked)]
    spelled = subprocess.run(codespell, check=False, cwd=ROOT).returncode == 0
    return 0 if spelled and not found else 1


if __name__ == "__main__":
    sys.exit(main())
