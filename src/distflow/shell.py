"""Quote text for a shell, and mask secrets.

``str`` and ``repr`` of a ``Secret`` hide its text. Code in other modules gets the text by ``reveal()`` or ``revealed()``, so a
search for ``reveal`` finds it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping

__all__ = ["MASK", "Secret", "mask", "quote", "quote_with_variables", "revealed"]

MASK = "********"


class Secret:
    """A text that must not be shown."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """Wrap ``value``."""
        self._value = value

    def reveal(self) -> str:
        """Return the secret text. Use it only to pass it to the process that needs it."""
        return self._value

    def __repr__(self) -> str:
        """Return an expression with the mask in place of the text."""
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        """Return the mask."""
        return MASK

    def __eq__(self, other: object) -> bool:
        """Compare the texts of two secrets."""
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        """Hash by the text."""
        return hash(self._value)


def mask(text: str, secrets: Iterable[Secret]) -> str:
    """Return ``text`` with the mask in place of every secret, longer secrets first. Empty secrets are ignored."""
    for value in sorted({secret.reveal() for secret in secrets}, key=len, reverse=True):
        if value:
            text = text.replace(value, MASK)
    return text


def revealed(secrets: Mapping[str, Secret]) -> dict[str, str]:
    """Return the secret texts by name. Use them only to pass them to the process that needs them."""
    return {name: secret.reveal() for name, secret in secrets.items()}


def quote(argv: Iterable[str]) -> str:
    """Return a shell command that runs exactly ``argv``."""
    return " ".join(shlex.quote(word) for word in argv)


def quote_with_variables(text: str, pattern: re.Pattern[str], variable: Callable[[re.Match[str]], str]) -> str:
    r"""Return ``text`` as one shell word in which a shell variable replaces each match of ``pattern``.

    ``variable`` returns the name of the variable for a match.

    >>> quote_with_variables("a b:@@PORT@@", re.compile("@@PORT@@"), lambda match: "PORT")
    '\'a b:\'"${PORT}"'
    """
    pieces: list[str] = []
    position = 0
    for match in pattern.finditer(text):
        if match.start() > position:
            pieces.append(shlex.quote(text[position : match.start()]))
        pieces.append('"${' + variable(match) + '}"')
        position = match.end()
    if position < len(text) or not pieces:
        pieces.append(shlex.quote(text[position:]))
    return "".join(pieces)
