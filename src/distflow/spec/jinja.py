"""Rendering with Jinja: names, lines and errors. Imported only for texts that are templates, because Jinja takes 60 ms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from jinja2 import Template, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError, TemplateError

from distflow.documents.problems import Mark, Problem, ProblemsFound
from distflow.documents.words import did_you_mean
from distflow.spec.sandbox import MAX_SIZE, BoundedEnvironment
from distflow.spec.tokens import TOKEN_NAMES

__all__ = ["Names", "read_names", "render_template"]

_MAX_TAGS = 20_000
"""Tags of a template; each is compiled to Python."""
_SYNTAX_HINT = (
    "text that only looks like a template goes between {% raw %} and {% endraw %}, or into a file sent with `localpath`"
)
_COMMENT_HINT = f"`{{#` begins a comment of the template, also in shell's ${{#name}}; {_SYNTAX_HINT}"
_UNDEFINED = re.compile(r"'(\w+)' is undefined")


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The variables of a template."""

    used: frozenset[str]
    assigned: frozenset[str]
    """By ``set``, ``for``, macros and the like."""


def read_names(template: str, file: str) -> Names:
    """Return which variables a template uses and assigns; raises ``ProblemsFound`` when it is not a template."""
    tree = _guarded(file, lambda: _parsed(template))
    names = list(tree.find_all(nodes.Name))
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    return Names(
        used=frozenset(name.name for name in names if name.ctx == "load"),
        assigned=frozenset(name.name for name in names if name.ctx != "load") | macros,
    )


def render_template(
    template: str, variables: Mapping[str, Any], *, file: str, fence: tuple[str, str], limit_s: float
) -> tuple[str, tuple[int, ...]]:
    """Return the rendered text, and for each of its lines the line of the template; raises ``ProblemsFound``.

    It renders twice, plainly and with marks of the lines: marks inside captured text (``{% set x %}…``) may change what a
    template computes with it, so what counts is the plain one, and the marked one is believed only where it says the same.
    """
    text = _guarded(file, lambda: _rendered(template, variables, None, limit_s), template, variables)
    try:
        marked = _rendered(template, variables, fence, limit_s)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError):
        marked = ""
    stripped = re.sub(f"{fence[0]}[sw][0-9]+{fence[1]}", "", marked)
    count = text.count("\n") + 1
    if stripped.count("\n") + 1 == count:
        return text, _lines_of(marked, fence, template.count("\n") + 1)
    return text, tuple(min(line, template.count("\n") + 1) for line in range(1, count + 1))


def _parsed(template: str) -> nodes.Template:
    tags = template.count("{{") + template.count("{%")
    if tags > _MAX_TAGS:
        raise SecurityError(f"the template has {tags} tags, and at most {_MAX_TAGS} are read")
    return BoundedEnvironment(limit_s=60, fence=None).parse(template)


def _rendered(template: str, variables: Mapping[str, Any], fence: tuple[str, str] | None, limit_s: float) -> str:
    environment = BoundedEnvironment(limit_s=limit_s, fence=fence)
    tree = environment.bounded(environment.parse(template))
    compiled: Template = environment.from_string(tree)
    pieces, size = [], 0
    for piece in compiled.generate(variables):
        environment.check_time()
        size += len(piece)
        if size > MAX_SIZE * (1 if fence is None else 4):
            raise SecurityError(f"the template prints more than {MAX_SIZE >> 20} MiB")
        pieces.append(piece)
    return "".join(pieces)


def _lines_of(marked: str, fence: tuple[str, str], last: int) -> tuple[int, ...]:
    """Read the marks: the first text of a line says where it stands, else its line break, else the next line that knows."""
    strong = re.compile(f"{fence[0]}s([0-9]+){fence[1]}")
    weak = re.compile(f"{fence[0]}w([0-9]+){fence[1]}")
    found: list[int] = []
    after = last
    for line in reversed(marked.split("\n")):
        match = strong.search(line) or weak.search(line)
        after = int(match.group(1)) if match else after
        found.append(after)
    return tuple(reversed(found))


def _guarded(file: str, work: Callable[[], Result], template: str = "", variables: Mapping[str, Any] | None = None) -> Result:
    """Do ``work`` and turn whatever a template can raise into a finding with its line."""
    try:
        return work()
    except ProblemsFound:
        raise
    except UndefinedError as error:
        raise ProblemsFound(_undefined(file, error, template, variables or {})) from None
    except TemplateSyntaxError as error:
        hint = _COMMENT_HINT if "comment" in (error.message or "") else _SYNTAX_HINT
        _refuse(file, error.lineno, f"the template is not valid: {_sentence(error.message)}", hint)
    except SecurityError as error:
        said = _sentence(str(error))
        if not said.startswith("the template"):
            said = f"the template does what is not allowed: {said}"
        _refuse(file, _line_of(error.__traceback__), said)
    except (RecursionError, MemoryError, SyntaxError):
        _refuse(file, 0, "the template is nested too deeply")
    except Exception as error:  # noqa: BLE001  an expression of a template may raise anything: 1/0, "a" + 1, [].pop()
        _refuse(file, _line_of(error.__traceback__), f"the template fails: {type(error).__name__}: {error}")


def _refuse(file: str, line: int, message: str, hint: str = "") -> NoReturn:
    raise ProblemsFound([Problem(where=Mark(file, line), message=message, hint=hint)]) from None


def _undefined(file: str, error: UndefinedError, template: str, variables: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield every variable that nobody defined, not only the one that Jinja met first."""
    match = _UNDEFINED.fullmatch(error.message or "")
    line = _line_of(error.__traceback__)
    if match is None:
        yield Problem(
            where=Mark(file, line), message=f"the template fails: {_sentence(error.message or 'something is undefined')}"
        )
        return
    tree = _parsed(template)
    names = read_names(template, file)
    forgiven = {
        item.node.name
        for item in (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter))
        if item.name in ("defined", "undefined", "default", "d") and isinstance(item.node, nodes.Name)
    }
    known = {*variables, *names.assigned, *BoundedEnvironment(limit_s=60, fence=None).globals}
    lines = {match.group(1): line}
    for name in tree.find_all(nodes.Name):
        if name.ctx == "load" and name.name not in known | forgiven:
            lines[name.name] = min(lines.get(name.name, name.lineno), name.lineno)
    for undefined, first in lines.items():
        yield Problem(
            where=Mark(file, first), message=f"the variable `{undefined}` is not defined", hint=_remedy(undefined, variables)
        )


def _remedy(name: str, variables: Mapping[str, Any]) -> str:
    if name in TOKEN_NAMES:
        form = f"{name}:…" if name in ("host", "input") else name
        return f"{{{{{form}}}}} is a token that distflow fills when the task starts: write it alone, not inside an expression"
    define = f"define it in `default-values:`, or with --set {name}=…"
    near_token = did_you_mean(name, TOKEN_NAMES, what="tokens")
    # The nearest token alone; a list of all of them would bury it.
    token = near_token.split("?")[0].replace("`", "{{", 1).replace("`", "}}", 1) + "? " if "?" in near_token else ""
    if not variables:
        return f"{token}{define}"
    near = did_you_mean(name, variables, what="variables")
    return f"{near}; or {define}" if near.startswith("did you mean") or not token else f"{token}{near}; or {define}"


def _line_of(trace: TracebackType | None) -> int:
    """Return the line of the template in a traceback, which Jinja rewrites to it; 0 when there is none."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _sentence(said: str | None) -> str:
    text = (said or "").strip().rstrip(".")
    return text[:1].lower() + text[1:]
