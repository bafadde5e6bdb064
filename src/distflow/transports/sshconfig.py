"""``~/.ssh/config`` as OpenSSH reads it: which directives hold for a host. Meaning is given to them in ``sshhost``.

paramiko's own reader knows no ``Include``, lets a ``Match`` that it does not understand hold for every host, and needs another
package for ``Match exec``; the tests hold this one against ``ssh -G``.
"""

from __future__ import annotations

import functools
import glob
import os
import pwd
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Directive", "SshConfigWrong", "Values", "local_user", "matches_list", "read_config", "split_words"]

_LINE = re.compile(r'\s*"?([A-Za-z0-9]+)"?(?:\s*=\s*|\s+|$)(.*)')
_MANY = frozenset({"identityfile", "certificatefile"})
_RAW = frozenset({"proxycommand", "localcommand", "remotecommand", "knownhostscommand"})
_RIVALS = {"proxyjump": "proxycommand", "proxycommand": "proxyjump"}
_MATCHES_ALONE = frozenset({"all", "canonical", "final"})
_MATCHES = frozenset({"host", "originalhost", "user", "localuser", "exec", "tagged"})
_DEEPEST = 16
_EXEC_TIMEOUT_S = 10.0
_SYSTEM_FOLDER = "/etc/ssh"


class SshConfigWrong(ValueError):
    """The configuration cannot be understood; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Directive:
    """One line of the configuration that holds for the host."""

    words: tuple[str, ...]
    """Its arguments; one, unsplit, for those that are commands."""
    where: str
    """``file:line``, for messages."""


Values = dict[str, list[Directive]]
"""Lower-case keyword → its directives: the first one found, or all of them for those that add up."""


def split_words(text: str, where: str = "") -> tuple[str, ...]:
    """Return the arguments of a line: quotes of both kinds, backslashes before them, and a comment at the end.

    >>> split_words('a "b c" # d')
    ('a', 'b c')
    """
    words: list[str] = []
    position, end = 0, len(text)
    while position < end:
        if text[position].isspace():
            position += 1
            continue
        if text[position] == "#":
            break
        word, quote = "", ""
        while position < end and (quote or not text[position].isspace()):
            char, following = text[position], text[position + 1 : position + 2]
            if char == "\\" and following and (following in "\"'\\" or (not quote and following == " ")):
                word += following
                position += 1
            elif not quote and char in "\"'":
                quote = char
            elif char == quote:
                quote = ""
            else:
                word += char
            position += 1
        if quote:
            raise SshConfigWrong(f"{where}: a quote is not closed")
        words.append(word)
    return tuple(words)


def matches_list(text: str, patterns: Sequence[str]) -> bool:
    """Return whether ``text`` matches one of ``patterns`` (``*``, ``?``) and none of those that begin with ``!``."""
    found = False
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        if re.fullmatch(re.escape(plain).replace(r"\*", ".*").replace(r"\?", "."), text, re.DOTALL):
            if plain != pattern:
                return False
            found = True
    return found


def read_config(host: str, given: Values, config_file: str | None = None, read: Callable[[Path], str] | None = None) -> Values:
    """Return what the configuration says of ``host``, behind what is ``given`` already; missing files say nothing.

    Raises ``SshConfigWrong``. ``config_file`` is read instead of the user's and the system's; ``none`` means no file at all.
    """
    reader = _Reader(host, {key: list(found) for key, found in given.items()}, read or _read_file)
    for is_final in (False, True):
        reader.is_final = is_final
        if is_final:
            # The second reading, for `Match final`, finds a name that is settled.
            settled = reader.hostname().replace("%", "%%")
            reader.values.setdefault("hostname", [Directive((settled,), "")])
        for path, folder in _files(config_file):
            reader.file(path, folder, 0, is_active=True)
        if not reader.wants_final:
            break
    return reader.values


def local_user() -> str:
    """Return our name as the system knows it; ssh does not ask the environment either."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def _files(config_file: str | None) -> list[tuple[Path, str]]:
    """Return the files in the order in which they are read, each with the folder of what it includes."""
    user_folder = os.path.expanduser("~/.ssh")
    if config_file == "none":
        return []
    if config_file is not None:
        return [(Path(os.path.expanduser(config_file)), user_folder)]
    return [(Path(user_folder, "config"), user_folder), (Path(_SYSTEM_FOLDER, "ssh_config"), _SYSTEM_FOLDER)]


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise SshConfigWrong(f"{path} cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=32)
def _lines(text: str, name: str) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """Return keyword, words and place of each line that says something; the hosts of a pool all look into one file."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parsed = _LINE.match(line)
        if parsed is None:
            raise SshConfigWrong(f"{where}: this is no `Keyword value`: {line.strip()}")
        keyword, rest = parsed[1].lower(), parsed[2].strip()
        words = (rest,) if keyword in _RAW else split_words(rest, where)
        if not words or not words[0]:
            raise SshConfigWrong(f"{where}: `{parsed[1]}` has no value")
        found.append((keyword, words, where))
    return tuple(found)


@dataclass
class _Reader:
    host: str
    values: Values
    read: Callable[[Path], str]
    is_final: bool = False
    wants_final: bool = False
    tries: dict[str, bool] = field(default_factory=dict)

    def file(self, path: Path, folder: str, depth: int, *, is_active: bool) -> None:
        """Take what holds for the host from one file; blocks in it can hold only where ``is_active``."""
        holds = is_active
        for keyword, words, where in _lines(self.read(path), str(path)):
            if keyword == "host":
                holds = is_active and matches_list(self.host, words)
            elif keyword == "match":
                # Conditions are looked at even where they cannot hold, so that a wrong one is found on every host.
                holds = self._does_match(words, where, is_active=is_active) and is_active
            elif keyword == "include":
                self._include(words, folder, depth, where, is_active=holds)
            elif holds:
                self._add(keyword, Directive(words, where))

    def _add(self, keyword: str, directive: Directive) -> None:
        known = self.values.get(keyword)
        if known is None:
            if _RIVALS.get(keyword) not in self.values:
                self.values[keyword] = [directive]
        elif keyword in _MANY and directive.words not in [one.words for one in known]:
            known.append(directive)

    def _include(self, words: Sequence[str], folder: str, depth: int, where: str, *, is_active: bool) -> None:
        if depth >= _DEEPEST:
            raise SshConfigWrong(f"{where}: more than {_DEEPEST} files include each other")
        for word in words:
            pattern = os.path.join(folder, os.path.expanduser(word))
            for path in sorted(glob.glob(pattern)):
                self.file(Path(path), folder, depth + 1, is_active=is_active)

    def _does_match(self, words: Sequence[str], where: str, *, is_active: bool) -> bool:
        left = list(words)
        result = True
        while left:
            word, equals, value = left.pop(0).partition("=")
            kind = word.removeprefix("!").lower()
            if kind in _MATCHES_ALONE:
                self.wants_final = self.wants_final or kind == "final"
                holds = kind == "all" or self.is_final
            elif kind not in _MATCHES:
                known = ", ".join(sorted(_MATCHES | _MATCHES_ALONE))
                raise SshConfigWrong(f"{where}: `Match {kind}` is not supported here (known are: {known})")
            else:
                if not equals and not left:
                    raise SshConfigWrong(f"{where}: `Match {kind}` has no value")
                argument = value if equals else left.pop(0)
                # A command runs only where everything before it holds, as with ssh.
                holds = result and is_active and self._holds(kind, argument)
            result = result and holds != (word != word.removeprefix("!"))
        return result

    def _holds(self, kind: str, argument: str) -> bool:
        patterns = argument.split(",")
        if kind == "host":
            return matches_list(self.hostname().lower(), [pattern.lower() for pattern in patterns])
        if kind == "originalhost":
            return matches_list(self.host.lower(), [pattern.lower() for pattern in patterns])
        if kind == "user":
            return matches_list(self._first("user") or local_user(), patterns)
        if kind == "localuser":
            return matches_list(local_user(), patterns)
        if kind == "tagged":
            return matches_list(self._first("tag"), patterns)
        return self._try(argument)

    def _first(self, keyword: str) -> str:
        found = self.values.get(keyword)
        return found[0].words[0] if found else ""

    def hostname(self) -> str:
        """Return where the connection goes, as far as is known now."""
        return self._first("hostname").replace("%h", self.host).replace("%%", "%") or self.host

    def _try(self, command: str) -> bool:
        """Return whether a command of ``Match exec`` ends with 0."""
        user = self._first("user") or local_user()
        tokens = {"%": "%", "h": self.hostname(), "n": self.host, "p": self._first("port") or "22", "r": user,
                  "u": local_user(), "d": os.path.expanduser("~"), "i": str(os.getuid()),
                  "l": os.uname().nodename, "L": os.uname().nodename.partition(".")[0]}  # fmt: skip
        line = re.sub("%(.)", lambda found: tokens.get(found[1], found[0]), command)
        if line not in self.tries:
            shell = os.environ.get("SHELL") or "/bin/sh"
            try:
                done = subprocess.run(
                    [shell, "-c", line], stdin=subprocess.DEVNULL, capture_output=True, timeout=_EXEC_TIMEOUT_S, check=False
                )
                self.tries[line] = done.returncode == 0
            except (OSError, subprocess.TimeoutExpired):
                self.tries[line] = False
        return self.tries[line]
