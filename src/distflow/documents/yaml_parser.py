"""Parse YAML text into a ``Document``: values with their positions, and with limits on depth and expanded aliases.

The parser reads libyaml's events and builds its own small tree. Nesting therefore cannot overflow the stack of the interpreter
or of libyaml, each part has a known line, and aliases are counted before they use memory. The following are errors with a line:
duplicate keys with different values, keys that are lists or mappings, unsupported tags, several documents, and aliases that
contain themselves or expand beyond the limit. A duplicate key with an equal value is a warning.

Scalars have the types of YAML 1.1, except that dates, numbers such as ``1:30`` and whole numbers such as ``010`` stay text.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from distflow.documents.document import Document, Path, Place, path_text
from distflow.documents.problems import Mark, Problem, ProblemsFound, Severity

__all__ = [
    "MAX_DEPTH",
    "MAX_NODES",
    "argument_value",
    "parse_yaml",
    "resolve",
]


MAX_DEPTH = 100
"""The maximum number of levels, with aliases expanded."""
MAX_NODES = 100_000
"""The maximum number of scalars, lists and mappings in the text, and of values with aliases expanded."""

_MESSAGES: tuple[tuple[str, str], ...] = (
    ("mapping values are not allowed", "a `:` is not allowed here; check the indentation, or put the value into quotes"),
    ("could not find expected ':'", "a `:` is missing after this key, or the line is indented wrongly"),
    ("did not find expected key", "this line does not fit into its mapping; check its indentation"),
    ("did not find expected '-' indicator", "this line does not fit into its list; check its indentation"),
    ("did not find expected ',' or ']'", "a `,` or a closing `]` is missing"),
    ("did not find expected ',' or '}'", "a `,` or a closing `}` is missing"),
    ("unexpected end of stream", "the file ends inside a quoted text; a closing quote is missing"),
    ("cannot start any token", "this character cannot begin a value; put the value into quotes"),
    ("undefined alias", "there is no anchor (`&name`) of this name above"),
    ("special characters are not allowed", "control characters are not allowed in YAML"),
    ("control characters are not allowed", "control characters are not allowed in YAML"),
)
"""Parts of PyYAML's messages, and the messages to print instead."""


class _Node(Struct, eq=False):
    """A part of the document while the tree is built. An alias is represented by the node of its anchor."""

    index: int
    """Offset of its first character in the text."""
    kind: str
    """``scalar``, ``list`` or ``map``."""
    value: Any = None
    raw: str | None = None
    plain: bool = False
    lines: tuple[int, ...] = ()
    """For a scalar of several lines, the number of the line in the text for each line of its value."""
    items: list[_Node] = field(default_factory=list)
    keys: list[_Node] = field(default_factory=list)
    """Keys of a mapping; its values are in ``items``."""
    open: bool = True
    """Whether it is still being read, so that an alias to it would contain itself."""
    size: int = 1
    """The number of parts that it expands to, including itself; known when it is closed."""
    depth: int = 0
    """The number of levels below it."""


class _Refused(Exception):
    """The document cannot be used. Contains the position and the message."""

    def __init__(self, index: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.message = message
        self.hint = hint


def parse_yaml(text: str, file: str, line_map: Sequence[int] = ()) -> Document:
    """Return the document in ``text``. Raises ``ProblemsFound``.

    ``line_map`` has the line in the file for each line of ``text``, if a template was rendered.
    """
    import yaml  # noqa: PLC0415  commands that read no document start without it

    starts = _line_starts(text)
    try:
        try:
            root = _build(_events(text), text, starts)
        except yaml.MarkedYAMLError as error:
            unclosed = error.context_mark is not None and "unexpected end of stream" in (error.problem or "")
            mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
            # Report a missing end at the last character of the text, not on an empty line below it.
            index = min(mark.index if mark is not None else 0, max(len(text.rstrip()) - 1, 0))
            raise _Refused(
                index, _readable(f"{error.context or ''} {error.problem or ''}".strip(), text[index : index + 1])
            ) from None
        except yaml.reader.ReaderError as error:
            raise _Refused(_first_forbidden(text), _readable(str(error.reason), "")) from None
        places: dict[Path, Place] = {}
        marker = _Marker(file, starts, line_map)
        if root is None:
            return Document(file=file, value=None, places={(): Place(mark=Mark(file), key=Mark(file))})
        flattener = _Flattener(marker, places)
        value = flattener.flatten(root)
    except _Refused as refused:
        where = _Marker(file, starts, line_map)(refused.index)
        raise ProblemsFound(
            [Problem(where=where, message=refused.message, hint=refused.hint, drawing=_drawn(text, starts, refused.index))]
        ) from None
    return Document(file=file, value=value, places=MappingProxyType(places), warnings=tuple(flattener.warnings))


class _Marker:
    """Converts an offset in the text to a ``Mark`` in the file."""

    def __init__(self, file: str, starts: Sequence[int], line_map: Sequence[int]) -> None:
        self._file, self._starts, self._map = file, starts, line_map

    def __call__(self, index: int) -> Mark:
        line = bisect.bisect_right(self._starts, index)
        return Mark(self._file, self.source(line), index - self._starts[line - 1] + 1)

    def line(self, line: int) -> Mark:
        return Mark(self._file, self.source(line))

    def source(self, line: int) -> int:
        """Return the line of the file for a line of the text."""
        return self._map[min(line, len(self._map)) - 1] if self._map else line


def _line_starts(text: str) -> list[int]:
    # Count lines like editors, by "\n" only. YAML also counts U+0085 and U+2028.
    return [0, *accumulate(len(line) + 1 for line in text.split("\n")[:-1])]


def _events(text: str) -> Iterator[Any]:
    import yaml  # noqa: PLC0415  see parse_yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return iter(yaml.parse(text, Loader=loader))


def _build(events: Iterable[Any], text: str, starts: Sequence[int]) -> _Node | None:
    import yaml  # noqa: PLC0415  see parse_yaml

    root: _Node | None = None
    stack: list[_Node] = []
    anchors: dict[str, _Node] = {}
    documents = count = 0
    for event in events:
        index: int = event.start_mark.index
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _Refused(
                    index, "a second document begins here", "keep one document in the file: remove `---` and the text below it"
                )
        elif isinstance(event, yaml.AliasEvent):
            root = _attach(stack, _anchored(anchors, str(event.anchor), index), index) or root
        elif isinstance(event, yaml.ScalarEvent | yaml.SequenceStartEvent | yaml.MappingStartEvent):
            node = _node_of(event, text, starts)
            count += 1
            if count > MAX_NODES:
                raise _Refused(index, f"the document has more than {MAX_NODES:,} keys and values")
            if event.anchor is not None:
                anchors[event.anchor] = node
            root = _attach(stack, node, index) or root
            if node.kind != "scalar":
                stack.append(node)
                if len(stack) > MAX_DEPTH:
                    raise _Refused(index, f"the document is nested more than {MAX_DEPTH} levels deep", "use fewer levels")
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            _close(stack.pop(), len(stack))
    return root


def _anchored(anchors: Mapping[str, _Node], name: str, index: int) -> _Node:
    target = anchors.get(name)
    if target is None:
        raise _Refused(
            index,
            f"`*{name}` is an alias, but there is no anchor `&{name}` above it",
            f"write `&{name}` before the value to repeat, or quote `*{name}` if it is plain text",
        )
    if target.open:
        raise _Refused(index, f"the alias `*{name}` is inside the value of its own anchor `&{name}`", "remove the alias")
    return target


def _close(node: _Node, above: int) -> None:
    """Compute and check the size and depth of a list or mapping. With aliases expanded, it may be much larger than the text."""
    node.open = False
    node.size += sum(item.size for item in node.items)
    node.depth = 1 + max((item.depth for item in node.items), default=0)
    if node.size > MAX_NODES or above + node.depth > MAX_DEPTH:
        what = f"more than {MAX_NODES:,} values" if node.size > MAX_NODES else f"more than {MAX_DEPTH} levels"
        raise _Refused(node.index, f"the aliases of this document expand to {what}", "write it with fewer aliases (`*name`)")


def _attach(stack: list[_Node], node: _Node, index: int) -> _Node | None:
    """Add ``node`` to the list or mapping that is being read. If there is none, return ``node``: it is the whole document."""
    if not stack:
        return node
    parent = stack[-1]
    if parent.kind == "map" and len(parent.keys) == len(parent.items):
        if node.kind != "scalar" or node.raw is None:
            raise _Refused(
                index, "a key must be a string", "write a string before the colon; quote it if it begins with `{` or `[`"
            )
        parent.keys.append(node)
    else:
        parent.items.append(node)
    return None


def _node_of(event: Any, text: str, starts: Sequence[int]) -> _Node:
    import yaml  # noqa: PLC0415  see parse_yaml

    index: int = event.start_mark.index
    tag: str | None = None if event.tag in (None, "!") else event.tag
    if tag is not None and tag not in _CORE:
        short = tag.replace("tag:yaml.org,2002:", "!!")
        raise _Refused(index, f"the tag `{short}` is not supported", "remove it, or quote a text that begins with `!`")
    if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
        kind, called = ("list", "list") if isinstance(event, yaml.SequenceStartEvent) else ("map", "mapping")
        if tag is not None and _CORE[tag] != kind:
            raise _Refused(index, f"the tag `!!{tag.rpartition(':')[2]}` does not fit a {called}", "remove the tag")
        return _Node(index, kind)
    raw: str = event.value
    plain = event.style in (None, "") and event.tag is None
    kind_of_scalar = _CORE[tag] if tag is not None else (resolve(raw) if plain else "str")
    try:
        value = _scalar_value(kind_of_scalar, raw)
    except ValueError:
        short = (tag or "").rpartition(":")[2]
        raise _Refused(index, f"the tag `!!{short}` does not fit the value `{raw[:40]}`", "remove the tag") from None
    is_block = event.style in ("|", ">")
    lines: tuple[int, ...] = ()
    if is_block or "\n" in raw:
        first = bisect.bisect_right(starts, index)
        lines = _content_lines(text, index, event.end_mark.index, event.style or "", raw, first)
        lines = lines or ((first + 1,) if is_block else ())
    is_missing = value is None and not raw
    return _Node(index, "scalar", value, None if is_missing else raw, plain, lines, open=False)


class _Flattener:
    """Converts the tree to values and places, and expands aliases and merge keys, within the limits of ``_close``."""

    def __init__(self, marker: _Marker, places: dict[Path, Place]) -> None:
        self._marker, self._places = marker, places
        self.warnings: list[Problem] = []

    def flatten(self, root: _Node) -> Any:
        return self._value(root, (), None)

    def _value(self, node: _Node, path: Path, key: _Node | None) -> Any:
        self._places[path] = self._place(node, key)
        if node.kind == "list":
            return [self._value(item, (*path, position), None) for position, item in enumerate(node.items)]
        if node.kind == "map":
            return {name: self._value(item, (*path, name), at) for name, (at, item) in self._entries(node, path).items()}
        return node.value

    def _place(self, node: _Node, key: _Node | None) -> Place:
        lines = tuple(self._marker.line(line) for line in node.lines)
        mark = lines[0] if lines else self._marker(node.index)
        at = self._marker(key.index) if key is not None else self._marker(node.index)
        return Place(mark=mark, key=at, raw=node.raw, plain=node.plain, lines=lines if len(lines) > 1 else ())

    def _entries(self, node: _Node, path: Path) -> dict[str, tuple[_Node, _Node]]:
        """Return the key and the value of each entry by name.

        The mapping's own keys override merged keys (``<<``), and an earlier merge overrides a later one.
        """
        own: dict[str, tuple[_Node, _Node]] = {}
        merged: dict[str, tuple[_Node, _Node]] = {}
        for key, item in zip(node.keys, node.items, strict=True):
            name = key.raw or ""
            if name == "<<" and key.plain:
                for source in item.items if item.kind == "list" else [item]:
                    if source.kind != "map":
                        raise _Refused(key.index, "`<<` needs a mapping or a list of mappings", "write `<<: *name`")
                    merged = {**self._entries(source, path), **merged}
            elif name in own:
                first = self._marker(own[name][0].index).line
                if not _are_equal(own[name][1], item):
                    hint = f"line {first} gives it another value; keep one of them"
                    raise _Refused(key.index, f"the key `{name}` is given twice, with different values", hint)
                message = f"the key `{name}` is given twice, with the same value"
                self.warnings.append(
                    Problem(
                        where=self._marker(key.index),
                        message=message,
                        hint=f"line {first} has the same key; remove one of them",
                        path=path_text((*path, name)),
                        severity=Severity.WARNING,
                    )
                )
            else:
                own[name] = (key, item)
        return {**merged, **own}


def _are_equal(one: _Node, other: _Node) -> bool:
    """Return whether two values are written the same way: equal scalars in the same order, under the same keys."""
    return one is other or (
        (one.kind, one.raw, one.plain, len(one.items)) == (other.kind, other.raw, other.plain, len(other.items))
        and all(map(_are_equal, one.keys, other.keys))
        and all(map(_are_equal, one.items, other.items))
    )


def _readable(message: str, character: str) -> str:
    """Return a message for people. ``message`` is PyYAML's message, ``character`` the character at which it stopped."""
    if character == "\t":
        return "this is not valid YAML: a tab cannot indent a line; use spaces"
    readable = next((readable for part, readable in _MESSAGES if part in message), message)
    return f"this is not valid YAML: {readable}"


def _first_forbidden(text: str) -> int:
    from yaml.reader import Reader  # noqa: PLC0415  see parse_yaml

    match = Reader.NON_PRINTABLE.search(text)
    return match.start() if match else 0


def _drawn(text: str, starts: Sequence[int], index: int) -> str:
    """Return the line of the text with a caret below the position; empty for a blank or very long line."""
    line = bisect.bisect_right(starts, index)
    content = text[starts[line - 1] :].split("\n", 1)[0].replace("\t", " ")
    column = index - starts[line - 1]
    return f"{content}\n{' ' * column}^" if content.strip() and len(content) <= 200 else ""


def _content_lines(text: str, start: int, end: int, style: str, value: str, first: int) -> tuple[int, ...]:
    """Return the line of the text for each line of ``value``; empty if the lines cannot be determined.

    ``start`` and ``end`` are the offsets of the scalar. ``style`` is ``|``, ``>``, a quote or empty. ``first`` is the line of
    ``start``.
    """
    wanted = len(value.split("\n")) - (1 if value.endswith("\n") and style in ("|", ">") else 0)
    if style == "|":
        return tuple(range(first + 1, first + 1 + wanted))
    source = text[start:end].split("\n")
    found = _folded(source[1:], first + 1) if style == ">" else _flow(source, first)
    return tuple(found[:wanted]) if len(found) >= wanted else ()


def _folded(source: list[str], first: int) -> list[int]:
    """Return the line number of each line in the value of a ``>`` scalar.

    YAML joins lines of equal indentation, but not empty and deeper lines.
    """
    filled = [len(line) - len(line.lstrip(" ")) for line in source if line.strip()]
    if not filled:
        return [first + position for position in range(len(source))]
    indent = filled[0]
    found = [first]
    for position, (before, line) in enumerate(pairwise(source), start=1):
        empty, was_empty = not line[indent:].strip(" "), not before[indent:].strip(" ")
        deeper, was_deeper = line[indent : indent + 1] in (" ", "\t"), before[indent : indent + 1] in (" ", "\t")
        if was_empty and not empty and not deeper:
            # The empty line before this line is one line break. Its entry becomes the entry of this line.
            found[-1] = first + position
        elif empty or deeper or was_deeper:
            found.append(first + position)
    return found


def _flow(source: list[str], first: int) -> list[int]:
    """Return the line number of each line in the value of a plain or quoted scalar.

    YAML joins lines, except that each empty line is a line break.
    """
    found = [first]
    for position, line in enumerate(source[1:], start=1):
        if not line.strip():
            found.append(first + position + 1)
    return found


# -- types of scalars -------------------------------------------------------------------------------------------------

_CORE: Mapping[str, str] = MappingProxyType(
    {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null")}
    | {"tag:yaml.org,2002:seq": "list", "tag:yaml.org,2002:map": "map"}
)
"""Supported tags, with the name of each type."""

# As PyYAML (and so OSMO) resolves them, except that dates, sexagesimal numbers and whole numbers such as 010 stay text.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("null", re.compile(r"~|null|Null|NULL|")),
    ("bool", re.compile(r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0b_*[01][01_]*)")),
    (
        "float",
        re.compile(
            r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
    ),
)
_TRUE = frozenset({"yes", "true", "on"})
_FALSE = frozenset({"no", "false", "off"})
_MAX_DIGITS = 4000
"""Longer numbers stay text: Python converts at most 4300 digits by default."""


class _WrittenFloat(float):
    """A number that prints as it was written, so that ``3.10`` in a template stays ``3.10``."""

    written: str

    def __str__(self) -> str:
        """Return the number as written."""
        return self.written


def resolve(raw: str) -> str:
    """Return the type that a scalar without quotes has: ``null``, ``bool``, ``int``, ``float`` or ``str``."""
    if len(raw) > _MAX_DIGITS:
        return "str"
    return next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(raw)), "str")


def _scalar_value(kind: str, raw: str) -> str | int | float | bool | None:
    """Return the value of a scalar of a known type. Raises ``ValueError`` for an invalid null, Boolean or number.

    The types of lists and mappings also raise it.
    """
    if kind == "str":
        return raw
    if kind == "null":
        if resolve(raw) != "null":
            raise ValueError(raw)
        return None
    if kind == "bool":
        word = raw.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(raw)
        return word in _TRUE
    digits = raw.replace("_", "").lower()
    if kind == "int":
        return int(digits, {"0x": 16, "0b": 2}.get(digits.lstrip("+-")[:2], 10))
    if kind == "float":
        number = _WrittenFloat(digits.replace(".inf", "inf").replace(".nan", "nan"))
        number.written = raw
        return number
    raise ValueError(kind)


def argument_value(raw: str) -> str | int | float | bool:
    """Return the value of ``--set name=raw``: a YAML number, true or false, or else a text.

    Unlike in a file, ``no``, ``~`` and an empty value stay text, because on a command line they probably mean a country, the
    home directory and an empty text.
    """
    kind = resolve(raw)
    if kind == "bool" and raw.lower() not in ("true", "false"):
        return raw
    value = _scalar_value(kind, raw)
    return raw if value is None else value
