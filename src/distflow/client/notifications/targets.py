"""Collect and check the entries of ``notify``: those of the configuration, of this user's profile, and of a spec."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import shutil
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.parse import urlsplit

from distflow.client.client import Client
from distflow.documents.notify import NotifyTarget
from distflow.documents.problems import Problem, Severity, raise_errors
from distflow.documents.text import did_you_mean
from distflow.errors import DistflowError, InputError, NotFound
from distflow.pools.model import Configuration
from distflow.state.credentials import CredentialStore, CredentialType
from distflow.state.directory import find_state_directory, write_profile

__all__ = [
    "INSTALL_APPRISE",
    "is_loopback",
    "own_targets",
    "set_profile_notify",
    "target_problems",
    "url_of",
]

INSTALL_APPRISE = "pip install 'distflow-cli[notify]'"
_URL_KEY = "url"


def own_targets(client: Client, configuration: Configuration) -> tuple[NotifyTarget, ...]:
    """Return the entries of the configuration and of this user's profile.

    Raises ``ProblemsFound`` or ``StateError`` if the profile cannot be used.
    """
    return (*configuration.notify, *client.profile_notify())


def set_profile_notify(client: Client, values: Sequence[str]) -> tuple[NotifyTarget, ...]:
    """Replace the entries of ``notify`` in this user's profile.

    Args:
        client: The client whose state directory stores the profile.
        values: The entries: names of credentials, or entries of ``notify`` in YAML, such as
            ``{credential: slack, on: [failed]}``. Without values, all entries are removed.

    Returns:
        The new entries.

    Raises:
        ProblemsFound: if an entry is wrong or cannot work on this machine.
        StateError: if the state directory is not writable.

    """
    from distflow.documents.yaml_parser import parse_yaml
    from distflow.pools.load import parse_profile_notify

    entries = [parse_yaml(value, "notify").value if value.startswith("{") else {"credential": value} for value in values]
    found = parse_profile_notify(entries, "notify")
    raise_errors(target_problems(client, found))
    write_profile(client.writable_directory().profile, "notify", entries or None)
    return found


def target_problems(
    client: Client, targets: Sequence[NotifyTarget], *, is_tolerant: bool = False, is_quick: bool = False
) -> list[Problem]:
    """Return a problem for each entry that cannot work on this machine, such as one whose credential cannot be read.

    Args:
        client: The client whose credentials the entries may use.
        targets: The entries.
        is_tolerant: Whether missing credentials are only warnings if this machine has no credentials, such as a CI machine.
        is_quick: Whether to accept a URL without importing Apprise, which takes more than a second, if the source of a
            plugin of Apprise declares the URL's scheme.

    Raises:
        StateError: if ``is_tolerant`` is set and the credentials cannot be read.

    """
    is_empty = is_tolerant and any(one.credential for one in targets) and not _credentials(client).all()
    severity = Severity.WARNING if is_empty else Severity.ERROR
    problems = []
    for target in targets:
        try:
            url_of(client, target, is_quick=is_quick)
            if target.command and shutil.which(_program_path(target.command[0])) is None:
                message = f"the command `{target.command[0]}` does not exist or is not executable"
                raise InputError(message, hint="give its absolute path, make it executable, or install it on this machine")
        except DistflowError as error:
            severity_of = severity if isinstance(error, NotFound) else Severity.ERROR
            problems.append(Problem(where=target.where, message=error.message, hint=error.hint, severity=severity_of))
    return problems


def _program_path(program: str) -> str:
    """Return a name for the search in PATH, or a path. Relative paths begin in the home directory, where commands run."""
    expanded = os.path.expanduser(program)
    return os.path.join(Path.home(), expanded) if os.sep in expanded else expanded


def url_of(client: Client, target: NotifyTarget, *, is_quick: bool = False) -> str:
    """Return the URL of an entry, from one of this user's credentials if the entry names one; empty for a command.

    For ``is_quick``, see ``target_problems``.

    Raises:
        InputError: if the credential has no URL, or its URL cannot be used. The error does not contain the URL.
        NotFound: if the credential does not exist.
        StateError: if the credential cannot be read.

    """
    if not target.credential:
        return target.url
    found = _credentials(client).find(target.credential)
    set_it = f"distflow credential set {target.credential} --payload-file {_URL_KEY}=-"
    if found is None:
        known = [one.name for one in _credentials(client).all()]
        near = did_you_mean(target.credential, known, what="credentials") + "; or " if known else ""
        raise NotFound(f"this machine has no credential `{target.credential}`", hint=f"{near}set it: `{set_it}`")
    values = tuple(found.payload.values()) if len(found.payload) == 1 else (found.payload.get(_URL_KEY),)
    is_generic = found.type is CredentialType.GENERIC
    if not is_generic or values[0] is None:
        hint = "name another credential"
        if is_generic:
            hint += f", or replace all its values: `distflow credential delete {target.credential} && {set_it}`"
        what = (
            f"has no key `{_URL_KEY}`" if is_generic else f"has the type {found.type.value}, but a notification needs GENERIC"
        )
        raise InputError(f"the credential `{target.credential}` {what}", hint=hint)
    url = values[0].reveal().strip()
    _check_url(target.credential, url, is_quick)
    return url


def _check_url(credential: str, url: str, is_quick: bool) -> None:
    set_it = f"distflow credential delete {credential} && distflow credential set {credential} --payload-file {_URL_KEY}=-"
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if "://" not in url or not url.isprintable() or " " in url or not parts.scheme:
        raise InputError(f"the value of the credential `{credential}` is not a URL", hint=f"set it again: `{set_it}`")
    if parts.scheme in ("http", "https"):
        if not parts.hostname:
            raise InputError(f"the URL of the credential `{credential}` has no host", hint=f"set it again: `{set_it}`")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            message = f"the URL of the credential `{credential}` is a secret, and http:// would send it without encryption"
            raise InputError(message, hint="use https://")
        return
    found = importlib.util.find_spec("apprise")
    if found is None:
        message = f"the URL of the credential `{credential}` begins with `{parts.scheme}://`, which needs apprise"
        raise InputError(message, hint=f"install it: {INSTALL_APPRISE}")
    if is_quick and _is_known_scheme(found, parts.scheme):
        return
    try:
        import apprise
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything
        message = f"apprise is installed, but cannot be imported: {type(error).__name__}: {error}"
        raise InputError(message, hint=f"install it again: {INSTALL_APPRISE}") from None
    if apprise.Apprise.instantiate(url, suppress_exceptions=True) is None:
        message = f"apprise does not accept the URL of the credential `{credential}`, which begins with `{parts.scheme}://`"
        raise InputError(message, hint=f"compare it with Apprise's documentation, and set it again: `{set_it}`")


def _is_known_scheme(apprise: ModuleSpec, scheme: str) -> bool:
    """Return whether the source of an Apprise plugin declares a scheme in the usual form. This imports no plugin."""
    word = f"['\"]{re.escape(scheme)}['\"]".encode()
    declaration = re.compile(rb"^ *(secure_)?protocol *=.*" + word, re.MULTILINE)
    files = Path(apprise.origin or "").parent.glob("plugins/**/*.py")
    return any(re.search(word, data) and declaration.search(data) for data in map(Path.read_bytes, files))


def is_loopback(host: str | None) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _credentials(client: Client) -> CredentialStore:
    directory = find_state_directory(client.environ)
    if directory.credentials.exists():
        directory.check_owner()  # another user's credentials could send messages to that user's servers
    return CredentialStore(directory.credentials)
