"""The packages that a workflow needs on its nodes: the lines of a requirements file of pip."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["Requirements"]


class Requirements(Struct, frozen=True, kw_only=True):
    """The packages of a Python environment on the nodes."""

    file: str
    """The name of the file, as the user gave it."""
    lines: tuple[str, ...]
    """Its lines and those of included files, without comments."""
    constraints: tuple[str, ...] = ()
    """The lines of its constraints files."""

    def digest(self, variables: Mapping[str, str]) -> str:
        """Return a key for the packages: the SHA-256 of the lines, the constraints, and the ``variables`` for pip and uv."""
        import hashlib  # noqa: PLC0415  frequent commands load this class, and few need its digest
        import json  # noqa: PLC0415

        given = sorted((name, value) for name, value in variables.items() if name.startswith(("PIP_", "UV_")))
        return hashlib.sha256(json.dumps([self.lines, self.constraints, given]).encode("utf-8", "surrogateescape")).hexdigest()
