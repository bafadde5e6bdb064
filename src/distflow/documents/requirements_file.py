"""Read a requirements file of pip, with the files that it includes, so that nodes can install the same packages.

Nodes get the lines, not the files. Lines with relative paths are therefore errors. Absolute paths may exist on the nodes. URLs
with passwords or tokens are errors, too, because plans show all lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from distflow.documents.problems import Mark, Problem, ProblemsFound, raise_errors
from distflow.documents.requirements import Requirements
from distflow.documents.source import read_text

__all__ = ["parse_requirements", "read_requirements"]

_LIMIT = 1 << 20
"""The maximum size in bytes of each file, and of all lines together."""
_MOST_INCLUDED = 50
_KIND = "requirements file"

_INCLUDE = re.compile(r"(?:-r|--requirement|-c|--constraint)(?:\s*=\s*|\s+|(?<=-[rc]))(?P<file>.+)")
_LOCATION = re.compile(r"(?:-e|--editable|-f|--find-links)(?:\s*=\s*|\s+|(?<=-[ef]))(?P<location>.+)")
_NAMED = re.compile(r"[A-Za-z0-9][\w.-]*\s*(?:\[[^\]]*\]\s*)?(?:@\s*(?P<url>\S.*)|[<>=!~;(].*|\s--\w.*)?")
_ARCHIVE = re.compile(r".*\.(?:whl|zip|tar|tgz|tar\.\w+)", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_LOGIN = re.compile(r"(?P<scheme>[A-Za-z0-9+.-]+)://(?P<login>[^/\s]+)@")
_PARAMETER = re.compile(r"[?&][^=&\s]*(?:token|key|sig|signature|password|passwd|secret)=(?P<value>[^&#\s]*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")


def read_requirements(path: str, shown: str | None = None) -> Requirements:
    """Return the requirements in the file at ``path``. ``shown`` is its name in messages.

    Raises ``ProblemsFound`` with all findings.
    """
    reader = _Reader()
    reader.read(path, path if shown is None else shown, is_constraint=False, above=())
    return reader.requirements(shown or path)


def parse_requirements(lines: Iterable[str], shown: str) -> Requirements:
    """Return the requirements in the lines of a file. ``shown`` is its name in messages.

    Paths of included files are relative to the working directory. Raises ``ProblemsFound`` with all findings.
    """
    reader = _Reader()
    reader.take("\n".join(lines), "", shown, is_constraint=False, above=())
    return reader.requirements(shown)


class _Reader:
    """Collects the lines of a file and of its included files."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constraints: list[str] = []
        self.problems: list[Problem] = []
        self._included = 0

    def read(self, path: str, shown: str, *, is_constraint: bool, above: tuple[str, ...]) -> None:
        """Add the lines of one file. ``above`` contains the files that include it."""
        try:
            text = read_text(path, shown=shown, limit=_LIMIT, kind=_KIND)
        except ProblemsFound as error:
            self.problems += error.problems
            return
        self.take(text, path, shown, is_constraint=is_constraint, above=(*above, os.path.realpath(path)))

    def take(self, text: str, path: str, shown: str, *, is_constraint: bool, above: tuple[str, ...]) -> None:
        """Add the lines of a file with the content ``text``. ``above`` contains the file and the files that include it."""
        for number, line in _logical_lines(text):
            where = Mark(shown, number)
            include = _INCLUDE.fullmatch(line)
            if include is not None:
                named = include["file"].strip()
                has_constraints = is_constraint or line.startswith(("-c", "--c"))
                self._include(named, path, shown, where, is_constraint=has_constraints, above=above)
            elif (problem := _problem_of(line, where)) is not None:
                self.problems.append(problem)
            else:
                (self.constraints if is_constraint else self.lines).append(line)

    def requirements(self, shown: str) -> Requirements:
        """Return the requirements that were read. Raises ``ProblemsFound`` with all findings."""
        if not self.problems and len("".join((*self.lines, *self.constraints)).encode(errors="surrogatepass")) > _LIMIT:
            self.problems.append(
                Problem(
                    where=Mark(shown),
                    message="the requirements are larger than 1 MiB",
                    hint="remove packages that the tasks do not need, or use an image that has the packages",
                )
            )
        raise_errors(self.problems)
        if not self.lines:
            hint = "write one requirement in each line, such as `torch==2.4.0`"
            raise ProblemsFound([Problem(where=Mark(shown), message="the file contains no packages", hint=hint)])
        return Requirements(file=shown, lines=tuple(self.lines), constraints=tuple(self.constraints))

    def _include(self, named: str, path: str, shown: str, where: Mark, *, is_constraint: bool, above: tuple[str, ...]) -> None:
        inner = os.path.join(os.path.dirname(path), named)
        if _URL.match(named):
            hint = "download the file, and include the copy"
            self.problems.append(Problem(where=where, message="a URL cannot be included: its content may change", hint=hint))
        elif os.path.realpath(inner) in above:
            self.problems.append(
                Problem(where=where, message=f"including `{named}` here makes a cycle", hint="remove this line")
            )
        elif self._included >= _MOST_INCLUDED:
            self.problems.append(
                Problem(where=where, message=f"more than {_MOST_INCLUDED} files are included", hint="merge some of them")
            )
        else:
            self._included += 1
            self.read(inner, os.path.join(os.path.dirname(shown), named), is_constraint=is_constraint, above=above)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each requirement with the number of its first line.

    Lines that end with a backslash are joined, and comments are removed.
    """
    joined, began = "", 0
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        began = began or number
        # A comment ends a requirement, even after a backslash in earlier lines, as in pip.
        content = re.sub(r"(^|\s)#.*$", "", line)
        if content.endswith("\\") and content == line:
            joined += content[:-1]
            continue
        joined = " ".join((joined + content).split())
        if joined:
            yield began, joined
        joined, began = "", 0


def _secrets(line: str) -> Iterator[str]:
    """Yield the passwords and tokens in the URLs of a line. Some may be variables."""
    for url in _LOGIN.finditer(line):
        user, colon, password = url["login"].partition(":")
        is_token = url["scheme"].lower().endswith(("http", "https"))
        yield password if colon or not is_token else user
    for parameter in _PARAMETER.finditer(line):
        yield parameter["value"]


def _problem_of(line: str, where: Mark) -> Problem | None:
    """Return the problem of a line that is not valid, names a relative path or has a URL with a password."""
    if any(_VARIABLE.sub("", secret) for secret in _secrets(line)):
        hint = "put it into ~/.netrc on the nodes, or write `${NAME}` and set the variable on the nodes"
        return Problem(where=where, message="the URL contains a password or a token, which distflow would print", hint=hint)
    option = _LOCATION.fullmatch(line)
    if option is None and line.startswith("-"):
        return None
    location, named = (option["location"], None) if option is not None else (line, _NAMED.fullmatch(line))
    is_archive = _ARCHIVE.fullmatch(line.split(" ", maxsplit=1)[0])
    if named is not None and not is_archive:
        if not named["url"]:
            return None  # a package from an index
        location = named["url"].strip()
    elif option is None and not is_archive and "/" not in line and not line.startswith("."):
        hint = "write one name with its version on each line, such as `torch==2.4.0`"
        return Problem(where=where, message=f"`{line}` is not a valid requirement", hint=hint)
    is_on_node = location.startswith("/") or (_URL.match(location) and not re.match(r"file:(?!/)", location, re.IGNORECASE))
    if is_on_node:
        return None
    hint = (
        "send your own code with `files` and install only its requirements, or write an absolute path that exists on all nodes"
    )
    return Problem(
        where=where, message=f"`{location}` is not an absolute path or a URL, so the nodes cannot find it", hint=hint
    )
