"""Render the template of a spec, and find the line in the file for each rendered line.

The steps follow OSMO. ``default-values``, which begins at column 0, is removed from the text and is not rendered.
It defines variables, which ``--set`` overrides, and ``--set-string`` overrides both. Tokens such as ``{{output}}`` remain
unchanged. Comments above the first section are not rendered, unless one of them has a tag such as ``{% set x = 1 %}``. Jinja
renders the rest in a sandbox. Files of ``localpath`` are never rendered. For a text without ``{{``, ``{%`` and ``{#``,
Jinja is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from distflow.documents.document import Document
from distflow.documents.problems import Mark, Problem, ProblemsFound, Severity
from distflow.documents.text import did_you_mean
from distflow.documents.yaml_parser import argument_value, parse_yaml
from distflow.spec.tokens import PLAIN_TOKENS, TOKEN_NAMES, TokenMask, choose_delimiters

__all__ = ["Rendered", "render", "split_defaults"]

_DEFAULTS = re.compile(r"default-values[ \t]*:")
_NEXT_PART = re.compile(r"[A-Za-z][A-Za-z0-9_-]*[ \t]*:|\{[%{#]|---|\.\.\.")
"""The beginnings of lines at column 0 that end ``default-values``."""
_IS_TEMPLATE = re.compile(r"\{[{%#]")
_HEADER = re.compile(r"(?:(?:[ \t]*#.*|[ \t]*|---[ \t]*)\n)*")
"""Comments, blank lines and ``---`` above the first section."""
_DEFINES = re.compile(r"\{%[-+]?\s*(?:set|macro|import|from|block|call|filter)\b")


class Rendered(Struct, frozen=True, kw_only=True):
    """A rendered text."""

    text: str
    line_map: tuple[int, ...] = ()
    """The line in the file for each line of ``text``; empty if each line has the same number in both."""
    problems: tuple[Problem, ...] = ()
    """Warnings only."""


def render(
    text: str,
    file: str,
    *,
    sets: Sequence[tuple[str, str]] = (),
    set_strings: Sequence[tuple[str, str]] = (),
    limit_s: float = 5.0,
) -> Rendered:
    """Render ``text``. Raises ``ProblemsFound``.

    Values of ``sets`` are YAML scalars (``--set flag=false`` is a Boolean). Values of ``set_strings`` are strings. ``limit_s``
    is the maximum CPU time of a rendering in seconds.
    """
    body, defaults_text = split_defaults(text, file)
    defaults, problems = _defaults(defaults_text, file)
    chosen = [
        *((name, argument_value(value), "--set") for name, value in sets),
        *((n, v, "--set-string") for n, v in set_strings),
    ]
    variables: dict[str, Any] = {**defaults, **{name: value for name, value, _ in chosen}}
    options = {name: option for name, _, option in chosen}

    delimiters = choose_delimiters(text, *(value for _, value in (*sets, *set_strings)))
    mask = TokenMask(delimiters)
    template = mask.protect(_without_header(body))
    used: frozenset[str] = frozenset()
    line_map: tuple[int, ...] = ()
    if _IS_TEMPLATE.search(template):
        masked = mask.protect_ranks(template, variables)
        if _IS_TEMPLATE.search(masked):
            from distflow.spec.jinja import read_names, render_template  # noqa: PLC0415  Jinja takes 60 ms to import

            names = read_names(template, file)
            used = names.used
            _check_options(options, defaults, used, problems)
            template = mask.protect_ranks(template, {*variables, *names.assigned})
            try:
                template, line_map = render_template(template, variables, file=file, delimiters=delimiters, limit_s=limit_s)
            except ProblemsFound as error:
                raise ProblemsFound([*problems, *error.problems]) from None
        else:
            template = masked
    if not used:
        _check_options(options, defaults, used, problems)
    return Rendered(text=mask.restore(template), line_map=line_map, problems=tuple(problems))


def _without_header(body: str) -> str:
    """Replace comments above the first section by blank lines if they contain template syntax.

    OSMO renders nothing above the first section. If one of these comments has a tag such as ``{% set x = 1 %}`` or
    ``{% macro f() %}`` (see ``_DEFINES``), distflow renders all of them.
    """
    found = _HEADER.match(body)
    header = found.group() if found else ""
    if _DEFINES.search(header):
        return body
    return re.sub(r"(?m)^[ \t]*#.*\{[{%#].*$", "", header) + body[len(header) :]


def split_defaults(text: str, file: str) -> tuple[str, str]:
    """Return the text without ``default-values``, and ``default-values`` alone. Blank lines preserve the line numbers.

    Raises ``ProblemsFound`` if the key is given twice.
    """
    body, defaults = [], []
    inside, begun = False, 0
    for number, line in enumerate(text.split("\n"), start=1):
        if _DEFAULTS.match(line):
            if begun:
                message = "the key `default-values` is given twice"
                hint = f"it is also in line {begun}; keep one of them"
                raise ProblemsFound([Problem(where=Mark(file, number, 1), message=message, hint=hint, path="default-values")])
            inside, begun = True, number
        elif inside and _NEXT_PART.match(line):
            inside = False
        body.append("" if inside else line)
        defaults.append(line if inside else "")
    return "\n".join(body), "\n".join(defaults) if begun else ""


def _defaults(text: str, file: str) -> tuple[dict[str, Any], list[Problem]]:
    if not text:
        return {}, []
    document = parse_yaml(text, file)
    values = document.value_at(("default-values",))
    if values is None:
        return {}, []
    if not isinstance(values, dict):
        message = "`default-values` must be a mapping of variables to their values"
        where, hint = document.key_mark_at(("default-values",)), "write one variable on each line, such as `  epochs: 3`"
        raise ProblemsFound([Problem(where=where, message=message, hint=hint, path="default-values")])
    return values, [problem for name in values for problem in _check_name(document, name)]


def _check_name(document: Document, name: str) -> list[Problem]:
    path = f"default-values.{name}"
    where = document.key_mark_at(("default-values", name))
    if not name.isidentifier():
        message = f"the variable `{name}` has no effect: a template cannot use a variable of this name"
        fixed = re.sub("[^A-Za-z0-9_]", "_", name)
        hint = f"rename it to `{fixed}`" if fixed.isidentifier() else "use letters, digits and `_`, not beginning with a digit"
    elif name in PLAIN_TOKENS:
        message = f"`{{{{{name}}}}}` is a token of distflow and not the variable `{name}`"
        hint = "rename the variable"
    else:
        return []
    return [Problem(where=where, message=message, hint=hint, path=path, severity=Severity.WARNING)]


def _check_options(
    options: Mapping[str, str], defaults: Mapping[str, Any], used: frozenset[str], problems: Sequence[Problem]
) -> None:
    """Raise ``ProblemsFound`` for options without effect. OSMO ignores them, so a misspelled name could waste a run."""
    found = []
    for name, option in options.items():
        if name in PLAIN_TOKENS:
            message = f"`{name}` cannot be set, because `{{{{{name}}}}}` is a token of distflow"
            found.append(Problem(where=Mark(option), message=message, hint="rename the variable"))
        elif name not in defaults and name not in used:
            known = {*defaults, *used} - {*TOKEN_NAMES} | {*defaults}
            hint = (
                did_you_mean(name, known, what="variables")
                if known
                else "the spec has no variables; to define this one, add it to its `default-values`"
            )
            found.append(Problem(where=Mark(option), message=f"the spec has no variable `{name}`", hint=hint))
    if found:
        raise ProblemsFound([*problems, *found])
