"""Jinja in a sandbox that cannot run away: bounded in time, in the size of every value, and in what code may reach.

Every loop, operator, call and filter passes a check, so that neither ``{{ 'a' * 10**10 }}`` nor nested loops over ranges hold a
command up: a template is refused after a deadline, however little it prints. Imported only for texts that are templates.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import StrictUndefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.sandbox import SandboxedEnvironment

__all__ = ["MAX_SIZE", "BoundedEnvironment"]

MAX_SIZE = 4 << 20
"""Characters or items of any value, and characters of the output."""
_MAX_ARGUMENT = 100_000
"""Largest number that may be given to a function, where it may be a width or a count."""
_MAX_BITS = 4096
_WIDE = re.compile(r"[0-9]{6,}")
_FOR = "_bounded_items"
_JOIN = "_bounded_join"


class _LineMarks(Extension):
    """Marks the line of the template before every piece of text and every line break, where the environment asks for it."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        fence: tuple[str, str] | None = self.environment.fence  # type: ignore[attr-defined]
        for token in stream:
            if fence is None or token.type != "data":
                yield token
                continue
            pieces = []
            for line, piece in enumerate(token.value.split("\n"), start=token.lineno):
                pieces.append((f"{fence[0]}s{line}{fence[1]}" if piece.strip() else "") + piece)
            marked = "".join(
                piece + (f"{fence[0]}w{token.lineno + position}{fence[1]}\n" if position < len(pieces) - 1 else "")
                for position, piece in enumerate(pieces)
            )
            yield Token(token.lineno, "data", marked)


class BoundedEnvironment(SandboxedEnvironment):
    """A sandbox with a deadline and bounds; one for each rendering."""

    intercepted_binops = frozenset(SandboxedEnvironment.default_binop_table)

    def __init__(self, *, limit_s: float, fence: tuple[str, str] | None, clock: Callable[[], float] = time.thread_time) -> None:
        """Allow ``limit_s`` seconds of work from now; mark lines with the two characters of ``fence`` unless it is ``None``.

        The clock is the thread's own: a busy machine or a suspended laptop does not make a template a slow one.
        """
        self.fence = fence
        self._clock = clock
        self._deadline = clock() + limit_s
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True, extensions=[_LineMarks], autoescape=False)
        self.globals.pop("lipsum", None)
        self.filters = {name: self._checked(function) for name, function in self.filters.items()}
        self.filters[_FOR] = self._items
        self.filters[_JOIN] = self._joined

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Return the tree with every loop and every ``~`` passing through a check."""
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _FOR)
        for join in list(tree.find_all(nodes.Concat)):
            items = list(join.nodes)
            join.nodes[:] = [_filtered(nodes.List(items, lineno=join.lineno), _JOIN)]
        return tree

    def check_time(self) -> None:
        """Refuse to go on after the deadline."""
        if self._clock() > self._deadline:
            raise SecurityError("the template takes too long to render")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation whose result is known to be small enough."""
        self.check_time()
        if operator == "**":
            _require(not (isinstance(left, int) and isinstance(right, int)) or left.bit_length() * max(right, 1) <= _MAX_BITS)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple | bytes) and isinstance(other, int):
                    _require(len(one) * other <= MAX_SIZE)
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(str(left), right if isinstance(right, tuple) else (right,))
        return _small(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063  as Jinja declares it
        """Call what a template may call, with arguments that cannot make a value too large."""
        __self.check_time()
        # The sandbox wraps str.format; whose method it was is said by what is wrapped.
        function = getattr(__obj, "__wrapped__", __obj)
        _check_call(getattr(function, "__self__", None), getattr(function, "__name__", ""), (*args, *kwargs.values()))
        return _small(super().call(__context, __obj, *args, **kwargs))

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, str | int | list | tuple)]
            _check_call(given[0] if given else None, function.__name__.removeprefix("do_"), tuple(given[1:]))
            return _small(function(*args, **kwargs))

        return checked

    def _items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def _joined(self, parts: list[Any]) -> str:
        self.check_time()
        texts = [str(part) for part in parts]
        _require(sum(map(len, texts)) <= MAX_SIZE)
        return "".join(texts)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _require(fits: bool) -> None:
    if not fits:
        raise SecurityError("the template makes a value that is too large")


def _small(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict | set):
        _require(len(value) <= MAX_SIZE)
    elif isinstance(value, int):
        _require(value.bit_length() <= _MAX_BITS)
    return value


def _check_call(owner: Any, name: str, arguments: tuple[Any, ...]) -> None:
    """Refuse arguments with which a function would make a value too large; widths and counts are the only numbers that can."""
    if name not in ("range", "bool", "abs", "round", "min", "max", "sum", "default", "append", "d"):
        _require(all(abs(value) <= _MAX_ARGUMENT for value in arguments if isinstance(value, int)))
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "replace" and isinstance(owner, str) and texts:
        old, new = texts[0], texts[-1]
        _require((owner.count(old) if old else len(owner) + 1) * len(new) <= MAX_SIZE)
    elif name == "join":
        items, glue = (
            (arguments[0] if arguments else (), owner) if isinstance(owner, str) else (owner, texts[0] if texts else "")
        )
        if isinstance(items, str | list | tuple) and isinstance(glue, str):
            _require(len(glue) * len(items) + sum(len(item) for item in items if isinstance(item, str)) <= MAX_SIZE)
    elif name in ("format", "format_map") and isinstance(owner, str):
        _check_format(owner, arguments)
    elif name == "indent" and isinstance(owner, str):
        width = max([len(text) for text in texts] + [value for value in arguments if isinstance(value, int)] + [4])
        _require(width * (owner.count("\n") + 1) <= MAX_SIZE)
    elif name in ("translate", "xmlattr", "tojson", "pprint", "wordwrap", "urlize") and isinstance(owner, str):
        _require(len(owner) <= _MAX_ARGUMENT)


def _check_format(pattern: str, values: Iterable[Any]) -> None:
    _require(_WIDE.search(pattern) is None)
    # A width may come from the values: '%*d' and '{:{w}}'.
    _require("*" not in pattern or all(abs(value) <= _MAX_ARGUMENT for value in values if isinstance(value, int)))
