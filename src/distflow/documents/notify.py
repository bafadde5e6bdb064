"""The entries of ``notify`` in specs, in the configuration and in profiles: targets of notifications, and their triggers."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from msgspec import Struct

from distflow.documents.document import View
from distflow.documents.problems import Mark
from distflow.documents.quantities import parse_duration
from distflow.documents.urls import SecretInUrl, parse_url
from distflow.errors import InputError

__all__ = ["NotifyTarget", "Trigger", "parse_notify"]

_TARGETS = ("url", "credential", "command")
_SLACK = "https://hooks.slack.com"
_AFTER_S = 1800.0


class Trigger(str, Enum):
    """The event that a notification reports."""

    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    WAITING = "waiting"
    """A group has waited for nodes for a long time."""


_DEFAULT = (Trigger.COMPLETED, Trigger.FAILED)


class NotifyTarget(Struct, frozen=True, kw_only=True):
    """An entry of ``notify``. It has exactly one of ``url``, ``credential`` and ``command``."""

    on: tuple[Trigger, ...] = _DEFAULT
    name: str = ""
    url: str = ""
    """A URL with ``http`` or ``https``. It may be a secret, so it is never shown in full."""
    credential: str = ""
    """The name of a credential whose value is the URL."""
    command: tuple[str, ...] = ()
    """A command to run on this machine. Specs cannot contain this key."""
    format: Literal["json", "slack"] | None = None
    """The format of the request's body; ``None`` for the format that the host of the URL expects."""
    after_s: float = _AFTER_S
    """How long a group waits for nodes, in seconds, before ``waiting`` is reported."""
    where: Mark = Mark("")

    @property
    def label(self) -> str:
        """The target's name for people: the given name, the credential, the program, or the host of the URL."""
        if self.name:
            return self.name
        return self.credential or (self.command[0] if self.command else parse_url(self.url).profile)


def parse_notify(owner: View, *, allows_commands: bool) -> tuple[NotifyTarget, ...]:
    """Return the entries of ``notify`` of a document. Wrong entries become findings, and are omitted."""
    found: list[NotifyTarget] = []
    for entry in owner.views("notify"):
        given = [key for key in _TARGETS if entry.has(key)]
        if "command" in given and not allows_commands:
            continue  # reported by the check against the schema
        if len(given) != 1:
            message = "the entry of `notify` has " + (f"both `{given[0]}` and `{given[1]}`" if given else "no target")
            targets = "`url`, `credential` or `command`" if allows_commands else "`url` or `credential`"
            entry.add(message, f"write exactly one of {targets}")
        elif _is_url_valid(entry):
            found.append(_target(entry))
    return tuple(found)


def _target(entry: View) -> NotifyTarget:
    triggers = tuple(dict.fromkeys(_TRIGGERS[text.value] for text in entry.texts("on") if text.value in _TRIGGERS))
    after_s = entry.parsed("after", parse_duration)
    if after_s is not None and Trigger.WAITING not in triggers:
        entry.warn("`after` has no effect, because `on` does not contain `waiting`", "add `waiting` to `on`", key="after")
    return NotifyTarget(
        on=triggers or _DEFAULT,
        name=entry.string("name") or "",
        url=entry.string("url") or "",
        credential=entry.string("credential") or "",
        command=tuple(text.value for text in entry.texts("command")),
        format=_FORMATS.get(entry.string("format") or ""),
        after_s=_AFTER_S if after_s is None else after_s,
        where=entry.key_mark(next(key for key in _TARGETS if entry.has(key))),
    )


def _is_url_valid(entry: View) -> bool:
    """Return whether the URL can be used, and add a finding if it cannot or if it is a secret."""
    url = entry.string("url")
    if url is None:
        return True
    scheme, separator, _ = url.partition("://")
    if separator and scheme.lower() not in ("http", "https"):
        hint = "store it with `distflow credential set NAME --payload-file url=-`, and write `credential: NAME`"
        entry.add(f"`url` cannot have the scheme `{scheme}://`, only http:// and https://", hint, key="url")
        return False
    parsed, reason = None, "it is a path"
    if not url.startswith("/"):
        try:
            parsed = parse_url(url)
        except SecretInUrl as error:
            reason = error.message
        except InputError:
            reason = "it is not a valid URL"  # the error's message quotes the path, which may be a secret
    if parsed is None:
        entry.add(f"`url` cannot be used: {reason}", "write https://host/path, or use `credential` for a secret URL", key="url")
        return False
    if parsed.profile == _SLACK:
        hint = "store it with `distflow credential set slack --payload-file url=-`, and write `credential: slack`"
        entry.warn("a webhook URL of Slack is a secret, and this file contains one", hint, key="url")
    return True


_TRIGGERS = {trigger.value: trigger for trigger in Trigger}
_FORMATS: dict[str, Literal["json", "slack"]] = {"json": "json", "slack": "slack"}
