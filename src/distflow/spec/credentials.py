"""The ``credentials`` of a task: parse them, and check that this machine has them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from msgspec import Struct

from distflow.documents.document import Text, View
from distflow.documents.problems import Problem, Severity
from distflow.documents.text import did_you_mean
from distflow.spec.model import CredentialUse, WorkflowSpec

__all__ = ["KnownCredential", "check_credentials", "parse_credentials"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class KnownCredential(Struct, frozen=True, kw_only=True):
    """A credential of this machine, without its values."""

    keys: tuple[str, ...]
    unusable_reason: str = ""
    """The reason why tasks cannot use it; empty if they can."""


def parse_credentials(task: View) -> tuple[CredentialUse, ...]:
    """Return the credentials of a task. Add findings for invalid entries and for conflicts with its files and variables."""
    entries = task.view("credentials")
    uses: list[CredentialUse] = []
    variables: dict[str, str] = dict.fromkeys(task.view("environment").keys, "`environment`")
    places = {
        posixpath.normpath(path): f"`files` (line {file.key_mark('path').line})"
        for file in task.views("files")
        if (path := file.string("path"))
    }
    for name in entries.keys:
        directory, mark = entries.text(name), entries.key_mark(name)
        if directory is not None:
            if _directory_is_good(entries, name, directory, places):
                uses.append(CredentialUse(name=name, directory=directory, mark=mark))
        elif entries.has(name):
            uses.append(CredentialUse(name=name, variables=_variables(entries.view(name), name, variables), mark=mark))
        elif entries.document.value_at((*entries.path, name)) == {}:
            entries.add(
                f"the credential `{name}` has no variable and no directory",
                f"write `{name}: {{VARIABLE: key}}`, or `{name}: /directory` for files",
                key=name,
            )
    return tuple(uses)


def check_credentials(
    spec: WorkflowSpec, known: Mapping[str, KnownCredential], *, severity: Severity = Severity.ERROR
) -> tuple[Problem, ...]:
    """Return a finding for each credential or key that is missing, and for each credential that tasks cannot use.

    ``severity`` applies to missing credentials only. All other findings are errors.
    """
    uses = [use for group in spec.groups for task in group.tasks for use in task.credentials]
    return tuple(problem for use in uses for problem in _findings(use, known, severity))


def _findings(use: CredentialUse, known: Mapping[str, KnownCredential], severity: Severity) -> Iterator[Problem]:
    found = known.get(use.name)
    if found is None:
        usable = [name for name, one in known.items() if not one.unusable_reason]
        set_it = f"distflow credential set {use.name} --payload-file KEY=FILE"
        hint = f"set it: `{set_it}`"
        if usable:
            hint = f"{did_you_mean(use.name, usable, what='credentials')}; or {hint}"
        message = f"this machine has no credential `{use.name}`"
        yield Problem(where=use.mark, message=message, hint=hint, severity=severity)
    elif found.unusable_reason:
        yield Problem(where=use.mark, message=f"tasks cannot use the credential `{use.name}`", hint=found.unusable_reason)
    else:
        for key in use.variables.values():
            if key.value not in found.keys:
                message = f"the credential `{use.name}` has no key `{key.value}`"
                yield Problem(where=key.mark, message=message, hint=did_you_mean(key.value, found.keys, what="keys"))


def _variables(entry: View, credential: str, taken: dict[str, str]) -> Mapping[str, Text]:
    found: dict[str, Text] = {}
    for name in entry.keys:
        key = entry.text(name)
        if not _VARIABLE.fullmatch(name):
            hint = "use letters, digits and `_`, not beginning with a digit"
            entry.add(f"`{name}` is not a valid name of an environment variable", hint, key=name)
        elif name.startswith("DISTFLOW_"):
            entry.add(
                f"`{name}` is reserved: distflow sets variables that begin with `DISTFLOW_`", "choose another name", key=name
            )
        elif name in taken:
            entry.add(f"the variable `{name}` is set twice: also in {taken[name]}", "keep one of them", key=name)
        elif key is not None:
            found[name] = key
            taken[name] = f"the credential `{credential}`"
    return MappingProxyType(found)


def _directory_is_good(entries: View, name: str, directory: Text, places: dict[str, str]) -> bool:
    """Return whether a directory is valid, and add it to ``places``. Add a finding if it is not."""
    value = directory.value
    parts = [part for part in value.split("/") if part not in ("", ".")]
    place = posixpath.normpath(value) if parts else ""
    near = next((other for other in places if f"{other}/".startswith(f"{place}/") or f"{place}/".startswith(f"{other}/")), None)
    if not parts or value.startswith("~") or "\0" in value or "\n" in value or ".." in parts:
        entries.add(
            f"`{value}` is not a valid directory for the credential `{name}`",
            "write a path such as `/run/secrets/NAME`, without `..` and `~`; or `{VARIABLE: key}` for variables",
            key=name,
        )
    elif parts[0] == "osmo":
        entries.add(
            f"`{value}` cannot be used: the directories `/osmo` and `osmo` are reserved", "choose another directory", key=name
        )
    elif near is not None:
        hint = "use a separate directory for each credential, without other files of the task"
        entries.add(f"the directory `{value}` of the credential `{name}` overlaps `{near}` of {places[near]}", hint, key=name)
    else:
        places[place] = f"the credential `{name}`"
        return True
    return False
