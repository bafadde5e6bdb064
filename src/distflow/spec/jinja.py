"""Render templates with Jinja in a sandbox with limits on time and on the size of values, and report errors with their lines.

Every loop, binary operator, call and filter is checked, so neither ``{{ 'a' * 10**10 }}`` nor nested loops over ranges can
block a command. Import this module only for templates, because importing Jinja takes 60 ms.
"""

from __future__ import annotations

import functools
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.sandbox import SandboxedEnvironment
from msgspec import Struct

from distflow.documents.problems import Mark, Problem, ProblemsFound
from distflow.documents.text import did_you_mean, most_similar
from distflow.spec.tokens import TOKEN_NAMES

__all__ = ["BoundedEnvironment", "Names", "read_names", "render_template"]

_MAX_SIZE = 4 << 20
"""The maximum number of characters or items of a value, and of characters of the output."""
_MAX_ARGUMENT = 100_000
"""The largest integer argument of functions whose arguments may be widths or counts."""
_MAX_BITS = 4096
_WIDE = re.compile(r"[0-9]{6,}")
_FOR = "_bounded_items"
_JOIN = "_bounded_join"


class _LineMarks(Extension):
    """Inserts the template's line number, between the two characters of ``delimiters``, before each text and each line break.

    If ``delimiters`` is ``None``, it changes nothing.
    """

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        delimiters: tuple[str, str] | None = self.environment.delimiters  # type: ignore[attr-defined]
        for token in stream:
            if delimiters is None or token.type != "data":
                yield token
                continue
            pieces = []
            for line, piece in enumerate(token.value.split("\n"), start=token.lineno):
                pieces.append((f"{delimiters[0]}s{line}{delimiters[1]}" if piece.strip() else "") + piece)
            marked = "".join(
                piece + (f"{delimiters[0]}w{token.lineno + position}{delimiters[1]}\n" if position < len(pieces) - 1 else "")
                for position, piece in enumerate(pieces)
            )
            yield Token(token.lineno, "data", marked)


_OUTSIDE = "compute the value outside of the template, and pass it with `--set NAME=VALUE`"


class _LimitExceeded(SecurityError):
    """A template takes too much time or memory."""

    def __init__(self, message: str, hint: str = _OUTSIDE) -> None:
        super().__init__(message)
        self.hint = hint


class BoundedEnvironment(SandboxedEnvironment):
    """A sandbox with a deadline and limits, for one rendering."""

    intercepted_binops = frozenset(SandboxedEnvironment.default_binop_table)

    def __init__(
        self, *, limit_s: float, delimiters: tuple[str, str] | None, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Allow ``limit_s`` seconds of CPU time from now; mark lines with the two characters of ``delimiters`` if given.

        The clock counts the thread's CPU time, so a busy machine or a suspended laptop does not cause a timeout.
        """
        self.delimiters = delimiters
        self._clock = clock
        self._limit_s = limit_s
        self._deadline = clock() + limit_s
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True, extensions=[_LineMarks], autoescape=False)
        self.globals.pop("lipsum", None)
        self.filters = {name: self._checked(function) for name, function in self.filters.items()}
        self.filters[_FOR] = self._items
        self.filters[_JOIN] = self._joined

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Add a check to every loop and every ``~`` of the tree."""
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _FOR)
        for join in list(tree.find_all(nodes.Concat)):
            items = list(join.nodes)
            join.nodes[:] = [_filtered(nodes.List(items, lineno=join.lineno), _JOIN)]
        return tree

    def check_time(self) -> None:
        """Raise after the deadline."""
        if self._clock() > self._deadline:
            raise _LimitExceeded(f"rendering the template takes more than {self._limit_s:g} s of CPU time")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation, if its result is small enough."""
        self.check_time()
        if operator == "**":
            _require(not (isinstance(left, int) and isinstance(right, int)) or left.bit_length() * max(right, 1) <= _MAX_BITS)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple | bytes) and isinstance(other, int):
                    _require(len(one) * other <= _MAX_SIZE)
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(str(left), right if isinstance(right, tuple) else (right,))
        return _small(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063  as Jinja declares it
        """Call a function that templates may call, if its result cannot be too large."""
        __self.check_time()
        # The sandbox wraps str.format. The string is the `__self__` of the wrapped method.
        function = getattr(__obj, "__wrapped__", __obj)
        _check_call(getattr(function, "__self__", None), getattr(function, "__name__", ""), (*args, *kwargs.values()))
        return _small(super().call(__context, __obj, *args, **kwargs))

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, str | int | list | tuple)]
            _check_call(values[0] if values else None, function.__name__.removeprefix("do_"), tuple(values[1:]))
            return _small(function(*args, **kwargs))

        return checked

    def _items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def _joined(self, parts: list[Any]) -> str:
        self.check_time()
        texts = [str(part) for part in parts]
        _require(sum(map(len, texts)) <= _MAX_SIZE)
        return "".join(texts)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _require(fits: bool) -> None:
    if not fits:
        limits = f"{_MAX_SIZE >> 20} MiB of text, {_MAX_BITS} bits for a number, {_MAX_ARGUMENT:,} for a count or width"
        raise _LimitExceeded(f"the template creates a value that is too large (limits: {limits})")


def _small(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict | set):
        _require(len(value) <= _MAX_SIZE)
    elif isinstance(value, int):
        _require(value.bit_length() <= _MAX_BITS)
    return value


def _check_call(owner: Any, name: str, arguments: tuple[Any, ...]) -> None:
    """Refuse arguments with which a function's result would be too large, such as a large width or count."""
    if name not in ("range", "bool", "abs", "round", "min", "max", "sum", "default", "append", "d"):
        _require(all(abs(value) <= _MAX_ARGUMENT for value in arguments if isinstance(value, int)))
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "replace" and isinstance(owner, str) and texts:
        old, new = texts[0], texts[-1]
        _require((owner.count(old) if old else len(owner) + 1) * len(new) <= _MAX_SIZE)
    elif name == "join":
        items, glue = (
            (arguments[0] if arguments else (), owner) if isinstance(owner, str) else (owner, texts[0] if texts else "")
        )
        if isinstance(items, str | list | tuple) and isinstance(glue, str):
            _require(len(glue) * len(items) + sum(len(item) for item in items if isinstance(item, str)) <= _MAX_SIZE)
    elif name in ("format", "format_map") and isinstance(owner, str):
        _check_format(owner, arguments)
    elif name == "indent" and isinstance(owner, str):
        width = max([len(text) for text in texts] + [value for value in arguments if isinstance(value, int)] + [4])
        _require(width * (owner.count("\n") + 1) <= _MAX_SIZE)
    elif name in ("translate", "xmlattr", "tojson", "pprint", "wordwrap", "urlize") and isinstance(owner, str):
        _require(len(owner) <= _MAX_ARGUMENT)


def _check_format(pattern: str, values: Iterable[Any]) -> None:
    _require(_WIDE.search(pattern) is None)
    # The widths of '%*d' and '{:{sizes[0]}}' come from the values.
    if "*" in pattern or _has_nested_field(pattern):
        _require(all(abs(value) <= _MAX_ARGUMENT for value in _integers(values)))


def _has_nested_field(pattern: str) -> bool:
    """Return whether the format of a field contains a field; false for patterns that ``str.format`` refuses."""
    try:
        return any("{" in (spec or "") for _, _, spec, _ in string.Formatter().parse(pattern))
    except ValueError:
        return False


def _integers(values: Iterable[Any]) -> Iterator[int]:
    """Yield the integers in values, and in the containers among them, which may contain themselves."""
    rest, seen = list(values), set[int]()
    while rest:
        value = rest.pop()
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            rest += value.values() if isinstance(value, dict) else value


_MAX_TAGS = 20_000
"""The maximum number of tags in a template. Each is compiled to Python."""
_SYNTAX_HINT = (
    "put text that only looks like a template between {% raw %} and {% endraw %}, or into a file that `localpath` sends"
)
_COMMENT_HINT = f"`{{#` begins a comment of the template, also in `${{#name}}` of a shell; {_SYNTAX_HINT}"
_UNDEFINED = re.compile(r"'(\w+)' is undefined")


Result = TypeVar("Result")


class Names(Struct, frozen=True, kw_only=True):
    """The variables of a template."""

    used: frozenset[str]
    assigned: frozenset[str]
    """The variables that ``set``, ``for``, macros and similar statements assign."""


def read_names(template: str, file: str) -> Names:
    """Return the variables that a template uses and assigns. Raises ``ProblemsFound`` if it is not a valid template."""
    tree = _guarded(file, lambda: _parsed(template), template)
    names = list(tree.find_all(nodes.Name))
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    return Names(
        used=frozenset(name.name for name in names if name.ctx == "load"),
        assigned=frozenset(name.name for name in names if name.ctx != "load") | macros,
    )


def render_template(
    template: str, variables: Mapping[str, Any], *, file: str, delimiters: tuple[str, str], limit_s: float
) -> tuple[str, tuple[int, ...]]:
    """Return the rendered text, and the line of the template for each of its lines. Raises ``ProblemsFound``.

    The template is rendered twice: without and with marks of lines. Marks in captured text (``{% set x %}…``) may change later
    computations. The text without marks is therefore the result. The marks are used only if both texts have the same number of
    lines. Otherwise each line of the text gets the line of the template with the same number.
    """
    text = _guarded(file, lambda: _rendered(template, variables, None, limit_s), template, variables)
    try:
        marked = _rendered(template, variables, delimiters, limit_s)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError):
        marked = ""
    stripped = re.sub(f"{delimiters[0]}[sw][0-9]+{delimiters[1]}", "", marked)
    count = text.count("\n") + 1
    if stripped.count("\n") + 1 == count:
        return text, _lines_of(marked, delimiters, template.count("\n") + 1)
    return text, tuple(min(line, template.count("\n") + 1) for line in range(1, count + 1))


def _parsed(template: str) -> nodes.Template:
    tags = template.count("{{") + template.count("{%")
    if tags > _MAX_TAGS:
        hint = "use loops instead of repeated tags, or split the workflow"
        raise _LimitExceeded(f"the template has {tags} tags, and the maximum is {_MAX_TAGS}", hint)
    return BoundedEnvironment(limit_s=60, delimiters=None).parse(template)


def _rendered(template: str, variables: Mapping[str, Any], delimiters: tuple[str, str] | None, limit_s: float) -> str:
    environment = BoundedEnvironment(limit_s=limit_s, delimiters=delimiters)
    tree = environment.bounded(environment.parse(template))
    compiled: Template = environment.from_string(tree)
    pieces, size = [], 0
    for piece in compiled.generate(variables):
        environment.check_time()
        size += len(piece)
        if size > _MAX_SIZE * (1 if delimiters is None else 4):
            hint = "use `replicas` for equal tasks, and send large texts with `localpath`"
            raise _LimitExceeded(f"the rendered text is larger than {_MAX_SIZE >> 20} MiB", hint)
        pieces.append(piece)
    return "".join(pieces)


def _lines_of(marked: str, delimiters: tuple[str, str], last: int) -> tuple[int, ...]:
    """Return the line of the template for each line of ``marked``.

    A line of ``marked`` gets the template line of its first text, or else of its line break, or else the same as the next line
    of ``marked``.
    """
    strong = re.compile(f"{delimiters[0]}s([0-9]+){delimiters[1]}")
    weak = re.compile(f"{delimiters[0]}w([0-9]+){delimiters[1]}")
    found: list[int] = []
    after = last
    for line in reversed(marked.split("\n")):
        match = strong.search(line) or weak.search(line)
        after = int(match.group(1)) if match else after
        found.append(after)
    return tuple(reversed(found))


def _guarded(file: str, work: Callable[[], Result], template: str = "", variables: Mapping[str, Any] | None = None) -> Result:
    """Call ``work``. Exceptions of the template become ``ProblemsFound`` with its line."""
    try:
        return work()
    except ProblemsFound:
        raise
    except UndefinedError as error:
        raise ProblemsFound(_undefined(file, error, template, variables or {})) from None
    except TemplateSyntaxError as error:
        hint = _COMMENT_HINT if "comment" in (error.message or "") else _syntax_hint(template, error.lineno)
        _refuse(file, error.lineno, f"the template is not valid: {_sentence(error.message)}", hint)
    except SecurityError as error:
        message = _sentence(str(error))
        if not isinstance(error, _LimitExceeded):
            message = f"the template does something that is not allowed: {message}"
        hint = error.hint if isinstance(error, _LimitExceeded) else _OUTSIDE
        _refuse(file, _line_of(error.__traceback__), message, hint)
    except (RecursionError, MemoryError, SyntaxError) as error:
        why = f": {error.msg}" if isinstance(error, SyntaxError) else ""
        _refuse(file, 0, f"the template is not valid, is nested too deeply or needs too much memory{why}")
    except Exception as error:  # noqa: BLE001  an expression of a template may raise anything: 1/0, "a" + 1, [].pop()
        _refuse(file, _line_of(error.__traceback__), f"the template fails: {type(error).__name__}: {error}")


def _refuse(file: str, line: int, message: str, hint: str = "") -> NoReturn:
    raise ProblemsFound([Problem(where=Mark(file, line), message=message, hint=hint)]) from None


def _undefined(file: str, error: UndefinedError, template: str, variables: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield all undefined variables, not only the first one that Jinja finds."""
    match = _UNDEFINED.fullmatch(error.message or "")
    line = _line_of(error.__traceback__)
    if match is None:
        yield Problem(
            where=Mark(file, line),
            message=f"the template fails: {_sentence(error.message or 'something is undefined')}",
            hint="correct the name, or give a default: `{{ name | default(…) }}`",
        )
        return
    tree = _parsed(template)
    names = read_names(template, file)
    forgiven = {
        item.node.name
        for item in (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter))
        if item.name in ("defined", "undefined", "default", "d") and isinstance(item.node, nodes.Name)
    }
    known = {*variables, *names.assigned, *BoundedEnvironment(limit_s=60, delimiters=None).globals}
    lines = {match.group(1): line}
    for name in tree.find_all(nodes.Name):
        if name.ctx == "load" and name.name not in known | forgiven:
            lines[name.name] = min(lines.get(name.name, name.lineno), name.lineno)
    for undefined, first in lines.items():
        yield Problem(
            where=Mark(file, first), message=f"the variable `{undefined}` is not defined", hint=_remedy(undefined, variables)
        )


def _syntax_hint(template: str, line: int) -> str:
    """Return a hint for a line that is not valid. It may have a token with a mistyped name, such as ``{{hots:master}}``."""
    lines = template.split("\n")
    for name in re.findall(r"\{\{\s*(\w+)\s*:", lines[line - 1] if 0 < line <= len(lines) else ""):
        if name not in ("host", "input") and (near := most_similar(name, ("host", "input"))):
            return f"did you mean `{{{{{near}:…}}}}`? Otherwise, {_SYNTAX_HINT}"
    return _SYNTAX_HINT


def _remedy(name: str, variables: Mapping[str, Any]) -> str:
    if name in TOKEN_NAMES:
        form = f"{name}:…" if name in ("host", "input") else name
        return f"`{{{{{form}}}}}` is a token of distflow: write it outside of expressions"
    define = f"define it in `default-values:`, or with `--set {name}=…`"
    near_token = did_you_mean(name, TOKEN_NAMES, what="tokens")
    # Only the nearest token, without the list of all tokens.
    token = near_token.split("?")[0].replace("`", "{{", 1).replace("`", "}}", 1) + "? " if "?" in near_token else ""
    if not variables:
        return f"{token}{define}"
    near = did_you_mean(name, variables, what="variables")
    return f"{near}; or {define}" if near.startswith("did you mean") or not token else f"{token}{near}; or {define}"


def _line_of(trace: TracebackType | None) -> int:
    """Return the line of the template in a traceback, or 0 if it is not known. Jinja puts these lines into tracebacks."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _sentence(message: str | None) -> str:
    text = (message or "").strip().rstrip(".")
    return text[:1].lower() + text[1:]
