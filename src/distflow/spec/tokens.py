"""The tokens of a spec, such as ``{{output}}``, ``{{host:master}}`` and ``{{rank_offset}}``.

They look like template variables, but their values are known only later, and ``{{uuid}}`` stays unchanged, as in OSMO.
Rendering must therefore not change them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from msgspec import Struct

__all__ = ["PLAIN_TOKENS", "RANK_TOKENS", "TOKEN_NAMES", "Token", "TokenMask", "choose_delimiters", "find_tokens"]

PLAIN_TOKENS = ("uuid", "workflow_id", "output")
"""Names that are always tokens, even if a variable has the same name (as in OSMO)."""
RANK_TOKENS = ("rank_offset", "rank_size", "world_size", "node_rank", "num_nodes", "master_addr", "master_port")
"""distflow's own tokens. A template variable of the same name has priority, so OSMO's specs keep their meaning."""
TOKEN_NAMES = (*PLAIN_TOKENS, *RANK_TOKENS, "host", "input")

# No quotes in the argument: in {{ '{{host:w-' ~ i ~ '}}' }} the inner braces belong to a string of the template.
_ARGUMENT = r"[^{}'\"\n]+?"
_OSMO = re.compile(r"\{\{[ \t]*(" + "|".join(PLAIN_TOKENS) + r"|(?:input|host)[ \t]*:[ \t]*" + _ARGUMENT + r")[ \t]*\}\}")
_ANY = re.compile(r"\{\{[ \t]*([A-Za-z_][A-Za-z0-9_]*)(?:[ \t]*:[ \t]*(" + _ARGUMENT + r"))?[ \t]*\}\}")

_PRIVATE = range(0xF0000, 0xFFFFD)


class Token(Struct, frozen=True):
    """A token in a string."""

    name: str
    argument: str | None
    position: int


def find_tokens(text: str) -> Iterable[Token]:
    """Yield the tokens in a rendered string, and all other texts that look like tokens."""
    return (Token(match.group(1), match.group(2), match.start()) for match in _ANY.finditer(text))


def choose_delimiters(*texts: str) -> tuple[str, str]:
    """Return two private-use characters that none of the texts contains."""
    used = {char for text in texts if not text.isascii() for char in text if char >= chr(_PRIVATE.start)}
    free = (chr(code) for code in _PRIVATE if chr(code) not in used)
    return next(free), next(free)


class TokenMask:
    """Replaces tokens in a text with placeholders, and restores them."""

    def __init__(self, delimiters: tuple[str, str]) -> None:
        """Use the two characters of ``delimiters`` for placeholders. No text may contain them."""
        self._delimiters = delimiters
        self._tokens: list[str] = []
        self._placeholder = re.compile(f"{delimiters[0]}t([0-9]+){delimiters[1]}")

    def protect(self, text: str) -> str:
        """Return ``text`` with OSMO's tokens replaced with placeholders."""
        return _OSMO.sub(lambda match: self._mask(re.sub(r"[ \t]*:[ \t]*", ":", match.group(1))), text)

    def protect_ranks(self, text: str, variables: Container[str]) -> str:
        """Return ``text`` with the rank tokens replaced with placeholders, except those that are variables of the template."""
        names = [name for name in RANK_TOKENS if name not in variables]
        if not names:
            return text
        pattern = re.compile(r"\{\{[ \t]*(" + "|".join(names) + r")[ \t]*\}\}")
        return pattern.sub(lambda match: self._mask(match.group(1)), text)

    def restore(self, text: str) -> str:
        """Return ``text`` with every placeholder replaced with its token."""
        return self._placeholder.sub(lambda match: "{{" + self._tokens[int(match.group(1))] + "}}", text)

    def _mask(self, token: str) -> str:
        self._tokens.append(token)
        return f"{self._delimiters[0]}t{len(self._tokens) - 1}{self._delimiters[1]}"
