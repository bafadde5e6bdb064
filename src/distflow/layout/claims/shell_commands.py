"""Parse shell text into simple commands, each word with its offset: enough of POSIX to find the flags of a task's programs.

Nothing is run. Values that only a shell can compute (command substitution, arithmetic, ``$1``) stay *unknown*. Comments,
redirections, and here-documents for programs other than a shell are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from distflow.structs import replace

__all__ = ["SHELLS", "TOKEN", "ShellCommand", "Word", "read_commands", "takes_argument"]

SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "ash"})
TOKEN = re.compile(r"\{\{\s*([a-z_]+)(?::\s*([^}\s]+))?\s*\}\}")
"""A token of the spec that distflow replaces before a task starts: ``{{rank_offset}}``, ``{{host:master}}``."""

_RESERVED = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"})
_WRAPPERS = frozenset({"exec", "nohup", "env", "command", "sudo"})
_DECLARE = frozenset({"export", "declare", "typeset", "readonly", "local"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[@\]\+?)?)=")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_UNKNOWN = "\0"
"""Marks the unknown parts in the value of an array."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARITHMETIC = re.compile(r"\(\((?:[^()\n]|\([^()\n]*\))*\)\)")
"""``(( n << 2 ))``, also after ``for``: its ``<<`` does not begin a here-document."""
_SET = re.compile(r"(?:(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=)))")
"""An assignment within ``((…))``."""
_HEREDOC = re.compile(r"<<-?(?!<)[ \t]*(?:(['\"])([^'\"\n]+)\1|\\?([\w.!%:@+-]+))")
_BRACED = re.compile(r"\$\{([A-Za-z_]\w*(?:\[@\])?)(?::?-([^{}$`]*))?\}")
_WITH_ARGUMENT = re.compile(r"[-+][A-Za-z]*[oO]|--rcfile|--init-file")


class _Variable(Struct, frozen=True):
    """``$name`` or ``${name:-default}``; with an empty name, a value that only a shell can compute."""

    name: str
    default: str | None = None


class Word(Struct, frozen=True, kw_only=True):
    """One word of a command, before its variables are replaced."""

    raw: str
    """The word as written, with quotes."""
    offset: int
    """The offset of its first character in the text."""
    parts: tuple[str | _Variable, ...]

    def expanded(self, variables: Mapping[str, str | None], unknown: str | None = None) -> str | None:
        """Return the word as a shell would expand it; ``None`` if the value of one of its variables is not known.

        A variable that ``variables`` does not contain has its default. If ``unknown`` is given, it replaces each unknown value.
        """
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text += part
                continue
            value = variables.get(part.name) if part.name in variables else part.default
            if value is None and unknown is None:
                return None
            text += (unknown or "") if value is None else value
        return text

    @property
    def literal(self) -> str:
        """The text of a word without variables; empty for a word with variables."""
        return "".join(part for part in self.parts if isinstance(part, str)) if not self.has_variables else ""

    @property
    def beginning(self) -> str:
        """The text before its first variable."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], str) else ""

    @property
    def has_variables(self) -> bool:
        """Whether a shell would replace a part of it."""
        return any(isinstance(part, _Variable) for part in self.parts)

    def divided(self, variables: Mapping[str, str | None]) -> tuple[Word, ...]:
        """Return the words that an unquoted variable or an array expands to.

        Other words, and variables with unknown values, are returned as they are.
        """
        names = [part.name for part in self.parts if isinstance(part, _Variable)]
        is_alone = len(names) == 1 and not any(part for part in self.parts if isinstance(part, str))
        is_divided = is_alone and (self.raw[:1] == "$" or names[0].endswith("[@]"))
        value = self.expanded(variables) if is_divided else None
        if value is None:
            return (self,)
        return tuple(replace(self, parts=(_Variable("") if _UNKNOWN in piece else piece,)) for piece in value.split())

    def value_of(self, name: str, variables: Mapping[str, str | None]) -> tuple[str, str | None]:
        """Return the name and the value of the variable that is set if this word is assigned to ``name``.

        ``name`` is ``A[@]`` for ``A=(…)`` and ``A[@]+`` for ``A+=(…)``. An array's value is its words, separated by spaces.
        """
        variable, brackets, more = name.partition("[@]")
        if not brackets:
            return name, self.expanded(variables)
        before = variables.get(variable + brackets) if more else ""
        return variable + brackets, f"{before or ''}{self.expanded(variables, _UNKNOWN)}"

    def without(self, count: int) -> Word:
        """Return the word without its first ``count`` literal characters (``NAME=`` before a value)."""
        first, *rest = self.parts
        if not isinstance(first, str):
            return self
        parts = (first[count:], *rest) if len(first) > count or not rest else tuple(rest)
        return Word(raw=self.raw[count:], offset=self.offset + count, parts=parts)


class ShellCommand(Struct, frozen=True, kw_only=True):
    """A simple command: ``A=1 python3 train.py --size 8`` has one assignment and four words."""

    words: tuple[Word, ...]
    """The program and its arguments; empty for bare assignments."""
    assignments: tuple[tuple[str, Word], ...] = ()
    """Variables that it sets, also by ``export``."""

    @property
    def program(self) -> str:
        """The program's name without its directory; empty if there is none or it contains a variable."""
        return self.words[0].literal.rpartition("/")[2] if self.words else ""


def takes_argument(option: str) -> bool:
    """Return whether the word after an option of a shell is the option's argument, as in ``bash -o pipefail``."""
    return _WITH_ARGUMENT.fullmatch(option) is not None


def read_commands(text: str) -> tuple[ShellCommand, ...]:
    """Return all simple commands of a shell text in order, regardless of the loops and branches around them."""
    return tuple(_Reader(text).commands())


class _Reader(Struct):
    """One pass over a text; ``at`` is the offset of the next character."""

    text: str
    at: int = 0
    parts: list[str | _Variable] | None = None
    """The parts of the current word; ``None`` between words."""
    start: int = 0
    words: list[Word] = field(default_factory=list)
    skip_next: bool = False
    """Whether the next word is the target of a redirection."""
    array: tuple[str, int, int] | None = None
    """The current ``NAME=(…)``: the beginning of its assignment, its offset, and the number of words before the array."""
    heredocs: list[tuple[str, bool]] = field(default_factory=list)
    """Delimiters whose bodies begin after this line, and whether a shell reads the body."""

    def commands(self) -> Iterator[ShellCommand]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self._backslash()
            elif self.array is not None and char in "\n)":
                self._end_word()
                if char == ")":
                    self._end_array()
                self.at += 1
            elif char == "(" and self._begins_array():
                self.at += 1
            elif char == "\n":
                yield from self._end_command()
                self.at += 1
                yield from self._bodies()
            elif char in " \t\r":
                self._end_word()
                self.at += 1
            elif char in ";|()&":
                yield from self._end_command()
                yield from self._arithmetic()
                self.at += 1
            elif char in "<>":
                self._redirection()
            elif char == "#" and self.parts is None:
                self._to_line_end()
            else:
                self._piece(char)
        yield from self._end_command()

    # -- pieces of a word ---------------------------------------------------------------------------------------------

    def _add(self, part: str | _Variable, length: int) -> None:
        if self.parts is None:
            self.parts, self.start = [], self.at
        if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += part
        else:
            self.parts.append(part)
        self.at += length

    def _backslash(self) -> None:
        continuation = re.compile(r"\\\r?\n").match(self.text, self.at)
        if continuation:
            self.at = continuation.end()
        else:
            self._add(self.text[self.at + 1 : self.at + 2], 2)

    def _piece(self, char: str) -> None:
        token = TOKEN.match(self.text, self.at) if char == "{" else None
        if token:
            self._add(token.group(), len(token.group()))
        elif char == "'":
            end = self.text.find("'", self.at + 1)
            end = len(self.text) if end < 0 else end
            self._add(self.text[self.at + 1 : end], end + 1 - self.at)
        elif char == '"':
            self._double_quoted()
        elif char in "$`":
            self._expansion()
        else:
            self._add(char, 1)

    def _double_quoted(self) -> None:
        self._add("", 1)
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                self._add("" if after == "\n" else after if after in '"\\$`' else char + after, 2)
            elif char in "$`":
                self._expansion()
            else:
                self._add(char, 1)
        self.at += 1

    def _expansion(self) -> None:
        rest = self.text[self.at + 1 : self.at + 2]
        braced = _BRACED.match(self.text, self.at)
        name = _NAME.match(self.text, self.at + 1)
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            self._add(_Variable(""), (end if end > 0 else len(self.text)) + 1 - self.at)
        elif rest == "(":
            self._add(_Variable(""), self._closing("(", ")") - self.at)
        elif braced:
            self._add(_Variable(braced.group(1), braced.group(2)), len(braced.group()))
        elif rest == "{":
            self._add(_Variable(""), self._closing("{", "}") - self.at)
        elif name:
            self._add(_Variable(name.group()), 1 + len(name.group()))
        elif rest and rest in "0123456789@*#?!-$":
            self._add(_Variable(""), 2)
        else:
            self._add("$", 1)

    def _closing(self, opening: str, closing: str) -> int:
        """Return the offset after the bracket that closes the one after ``$``; brackets inside quotes do not count."""
        depth, at, quote = 0, self.at + 1, ""
        while at < len(self.text):
            char = self.text[at]
            if char == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in (opening, closing):
                depth += 1 if char == opening else -1
                if depth == 0:
                    return at + 1
            at += 1
        return len(self.text)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end_word(self) -> None:
        if self.parts is None:
            return
        if not self.skip_next:
            self.words.append(
                Word(raw=self.text[self.start : self.at], offset=self.start, parts=tuple(self.parts)),
            )
        self.parts, self.skip_next = None, False

    def _begins_array(self) -> bool:
        """Return whether a bracket begins the words of ``NAME=(…)``, and if so, store the text before it."""
        name = self.parts[0] if self.parts is not None and len(self.parts) == 1 else None
        found = _ARRAY.fullmatch(name) if isinstance(name, str) and self.array is None else None
        if found:
            self.array = f"{found.group(1)}[@]{found.group(2)}", self.start, len(self.words)
            self.parts = None
        return found is not None

    def _end_array(self) -> None:
        if self.array is not None:
            beginning, start, count = self.array
            parts: list[str | _Variable] = [beginning]
            for word in self.words[count:]:
                has_blanks = any(re.search(r"\s", part) for part in word.parts if isinstance(part, str))
                parts += [" ", _Variable("")] if has_blanks else [" ", *word.parts]
            self.words[count:] = [Word(raw=self.text[start : self.at + 1], offset=start, parts=tuple(parts))]
            self.array = None

    def _end_command(self) -> Iterator[ShellCommand]:
        self._end_word()
        command = _command(self.words)
        self.words, self.skip_next, self.array = [], False, None
        if command.words or command.assignments:
            yield command

    def _arithmetic(self) -> Iterator[ShellCommand]:
        """Skip all of ``((…))`` except its last character, and yield a command that sets its variables to unknown values."""
        found = _ARITHMETIC.match(self.text, self.at)
        if found:
            unknown = Word(raw="", offset=self.at, parts=(_Variable(""),))
            self.at = found.end() - 1
            if names := [before or after for before, after in _SET.findall(found.group())]:
                yield ShellCommand(words=(), assignments=tuple((name, unknown) for name in names))

    def _to_line_end(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _redirection(self) -> None:
        if self.parts is not None and all(isinstance(part, str) and part.isdigit() for part in self.parts):
            self.parts = None  # the number of a stream: 2>file
        self._end_word()
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc and not self.text.startswith("<<<", self.at):
            self.heredocs.append((heredoc.group(2) or heredoc.group(3), _command(self.words).program in SHELLS))
            self.at = heredoc.end()
            return
        while self.at < len(self.text) and self.text[self.at] in "<>&|":
            self.at += 1
        self.skip_next = True

    def _bodies(self) -> Iterator[ShellCommand]:
        """Skip the here-documents that begin here. If a shell reads one of them, yield its commands."""
        for delimiter, feeds_a_shell in self.heredocs:
            end = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*\r?$", re.MULTILINE).search(self.text, self.at)
            stop = end.start() if end else len(self.text)
            if feeds_a_shell:
                # The text before the body is blanked, so that offsets refer to the whole text.
                blank = re.sub(r"[^\n]", " ", self.text[: self.at])
                yield from read_commands(blank + self.text[self.at : stop])
            self.at = end.end() if end else stop
        self.heredocs = []


def _command(words: list[Word]) -> ShellCommand:
    """Return a command's assignments, program and arguments, without words such as ``if`` and ``sudo`` before the program."""
    assignments: list[tuple[str, Word]] = []
    rest = list(words)
    while rest:
        word = rest[0].literal
        assigned = _ASSIGNMENT.match(rest[0].beginning)
        if assigned:
            assignments.append((assigned.group(1), rest[0].without(assigned.end())))
        elif word not in _RESERVED and word not in _WRAPPERS:
            break
        rest.pop(0)
    if rest and rest[0].literal in _DECLARE:
        for item in rest[1:]:
            assigned = _ASSIGNMENT.match(item.beginning)
            if assigned:
                assignments.append((assigned.group(1), item.without(assigned.end())))
        rest = []
    elif rest and rest[0].literal in {"for", "read", "select"}:
        # The values of loop variables and of `read` are not known before the script runs.
        unknown = Word(raw="", offset=rest[0].offset, parts=(_Variable(""),))
        names = rest[1:2] if rest[0].literal != "read" else rest[1:]
        assignments += [(item.literal, unknown) for item in names if _NAME.fullmatch(item.literal)]
        rest = []
    return ShellCommand(words=tuple(rest), assignments=tuple(assignments))
