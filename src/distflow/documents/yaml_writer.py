"""Write a document as YAML for people: keys in their order, and texts of several lines as blocks where PyYAML allows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from distflow.errors import InputError

__all__ = ["unsupported", "yaml_text"]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks where PyYAML allows it."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_printable = all(line.isprintable() for line in text.split("\n"))
    # PyYAML writes some control characters without quotes, and then cannot read them.
    style = '"' if not is_printable else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


_Dumper.add_multi_representer(PurePath, lambda dumper, path: _represent_text(dumper, str(path)))


def yaml_text(document: Mapping[str, Any]) -> str:
    """Return a document as YAML in the order of its keys. Raises ``InputError`` for values that YAML cannot express."""
    try:
        text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    except yaml.representer.RepresenterError as error:
        raise unsupported(error.args[-1]) from None
    return text


def unsupported(value: object) -> InputError:
    """Return the error for a value that a spec cannot contain."""
    return InputError(f"a spec cannot contain {value!r}", hint="use strings, numbers, Booleans, lists, mappings and paths")
