"""Builds the real objects that commands use. Imports of weight are made where they are needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import InputError
from distflow.state.directory import StateDirectory, find_state_directory

if TYPE_CHECKING:
    from distflow.pools.hostfile import Host
    from distflow.pools.model import Configuration
    from distflow.state.mirror import Mirror
    from distflow.state.store import Store
    from distflow.storage.credentials import CredentialsFor

__all__ = [
    "configuration",
    "credentials_for",
    "datasets_url",
    "hosts",
    "mirror",
    "open_store",
    "preferred_pool",
    "state_directory",
    "user_name",
    "wake_if_needed",
]


def state_directory() -> StateDirectory:
    """Return this user's state directory, made when it is not there yet. Raises ``StateError``."""
    return find_state_directory(os.environ).ensure()


@contextmanager
def open_store(directory: StateDirectory, *, quiet: bool = False) -> Iterator[Store]:
    """Open the store for one command; say when it cannot be written, unless ``quiet``."""
    from distflow.state.store import Store  # sqlite3 and msgspec, not needed for --help

    with Store(directory.store) as store:
        if store.is_read_only and not quiet:
            print(
                f"note: {store.path} cannot be written: this is what it held then, and nothing is supervised", file=sys.stderr
            )
        yield store


def mirror(directory: StateDirectory) -> Mirror:
    """Return the mirrored logs."""
    from distflow.state.mirror import Mirror

    return Mirror(directory.logs)


def configuration(*, profile: bool = True) -> Configuration:
    """Read the configuration that holds in this directory; with ``profile``, the preferred pool is its default one.

    Raises ``InputError``, ``ProblemsFound`` and ``StateError``.
    """
    from distflow.pools.load import load_configuration

    try:
        folder = Path.cwd()
    except FileNotFoundError:
        raise InputError("the working directory is not there any more", hint="cd to one that is") from None
    found = load_configuration(folder, os.environ)
    preferred = preferred_pool() if profile else None
    if preferred is None or preferred == found.default_pool:
        return found
    if preferred not in found.pools:
        where = found.file or "the built-in configuration"
        print(f"note: {where} has no pool {preferred!r}, which your profile prefers", file=sys.stderr)
        return found
    return replace(found, default_pool=preferred)


def preferred_pool() -> str | None:
    """Return the pool of this user's profile. Raises ``StateError``."""
    from distflow.state.profile import read_pool

    return read_pool(find_state_directory(os.environ).profile)


def credentials_for() -> CredentialsFor:
    """Return what knows the credentials of a URL's profile; without one the environment and the driver's own chain hold."""
    from distflow.state.storekeys import kept_in

    directory = find_state_directory(os.environ)
    if directory.credentials.exists():
        directory.check_owner()  # they name servers, to which data is sent
    return kept_in(directory.credentials)


def datasets_url(configuration: Configuration) -> str:
    """Return the URL below which datasets lie: the configured one, else a folder of the state directory."""
    return configuration.datasets or f"file://{find_state_directory(os.environ).path.resolve()}/datasets"


def hosts(hostfile: str | None) -> tuple[Host, ...] | None:
    """Read the hostfile that was given, if one was. Raises ``ProblemsFound``."""
    if hostfile is None:
        return None
    from distflow.pools.load import load_hostfile

    return load_hostfile(hostfile)


def user_name() -> str:
    """Return who we are; where neither the environment nor the system has a name for us (containers), the user's number."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def wake_if_needed(directory: StateDirectory, store: Store) -> None:
    """Start a supervisor if there is unfinished work and none is at it; readers do this in passing."""
    if not store.is_read_only and store.has_unfinished():
        from distflow.supervisor.process import ensure_supervisor, is_running

        if not is_running(directory):
            ensure_supervisor(directory, wait=False)
