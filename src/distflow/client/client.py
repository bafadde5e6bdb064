"""What every call of the client works with: the state directory, its store, the configuration, the supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
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
    from distflow.supervisor.process import Held

__all__ = ["Client", "now", "state_directory_of", "user_name"]


def now() -> float:
    """Return the time in seconds since the epoch (UTC), by the clock that decisions are made by."""
    from distflow.supervisor.clock import SystemClock

    return SystemClock().now()


def user_name() -> str:
    """Return the name of this user; the user's number where neither the environment nor the system has a name (containers)."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def state_directory_of(environ: Mapping[str, str]) -> StateDirectory:
    """Return the state directory that an environment names. It is neither created nor checked."""
    return find_state_directory(environ)


def _ignore(_: str) -> None:
    """Take no notice."""


class Client:
    """This user's workflows on this machine: a context manager that every function of ``distflow.client`` takes first.

    Nothing is opened before it is needed. A client belongs to one thread. It starts a background supervisor where there is
    unfinished work, and never waits for one.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
        notify: Callable[[str], None] = _ignore,
    ) -> None:
        """Work on the state directory that ``environ`` names (default: the environment of this process).

        Args:
            folder: Where the configuration is searched from; default: the working directory of each call.
            environ: Variables such as ``DISTFLOW_STATE`` and ``DISTFLOW_CONFIG``.
            notify: Called with each remark that is not an error, such as ``warning: …``.

        """
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.notify = notify
        self._folder = folder
        self._directory: StateDirectory | None = None
        self._store: Store | None = None
        self._held: Held | None = None

    def __enter__(self) -> Client:
        """Open nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Close the store, if it was opened."""
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def directory(self) -> StateDirectory:
        """The state directory, to read from; it is created when it does not exist.

        One of another user is only read: work in a directory that can be written is done with this user's rights. Raises
        ``StateError``.
        """
        if self._directory is None:
            from distflow.state.opening import is_read_only

            found = find_state_directory(self.environ)
            if not os.path.exists(found.store):
                found.ensure()
            elif not is_read_only(found.store):
                found.check_owner()
            self._directory = found
        return self._directory

    def writable_directory(self) -> StateDirectory:
        """Return the state directory, created if need be, and proved to be writable. Raises ``StateError``."""
        self._directory = find_state_directory(self.environ).ensure()
        return self._directory

    @property
    def store(self) -> Store:
        """The records, opened when first asked for. Raises ``StateError``."""
        if self._store is None:
            from distflow.state.store import Store  # sqlite3 and msgspec, which not every call needs

            self._store = Store(self.directory.store)
            if self._store.is_read_only:
                self.notify(f"note: {self._store.path} cannot be written: this is what it held then, and nothing is supervised")
        return self._store

    @property
    def mirror(self) -> Mirror:
        """The mirrored logs."""
        from distflow.state.mirror import Mirror

        return Mirror(self.directory.logs)

    def configuration(self, *, profile: bool = True) -> Configuration:
        """Read the configuration that holds here; with ``profile``, the pool that the user prefers is its default one.

        Raises ``InputError``, ``ProblemsFound`` and ``StateError``.
        """
        from distflow.pools.load import load_configuration

        try:
            folder = self._folder or Path.cwd()
        except FileNotFoundError:
            raise InputError("the working directory is not there any more", hint="cd to one that is") from None
        found = load_configuration(folder, self.environ)
        preferred = self.preferred_pool() if profile else None
        if preferred is None or preferred == found.default_pool:
            return found
        if preferred not in found.pools:
            where = found.file or "the built-in configuration"
            self.notify(f"note: {where} has no pool {preferred!r}, which your profile prefers")
            return found
        return replace(found, default_pool=preferred)

    def preferred_pool(self) -> str | None:
        """Return the pool of this user's profile. Raises ``StateError``."""
        from distflow.state.profile import read_pool

        return read_pool(find_state_directory(self.environ).profile)

    def hosts(self, hostfile: str | None) -> tuple[Host, ...] | None:
        """Read a hostfile, if one is named. Raises ``ProblemsFound``."""
        if hostfile is None:
            return None
        from distflow.pools.load import load_hostfile

        return load_hostfile(hostfile)

    def credentials_for(self) -> CredentialsFor:
        """Return the source of credentials for URLs: those that are kept here, else the environment and the driver's own."""
        from distflow.state.storekeys import kept_in

        directory = find_state_directory(self.environ)
        if directory.credentials.exists():
            directory.check_owner()  # they name servers, to which data is sent
        return kept_in(directory.credentials)

    def datasets_url(self, configuration: Configuration) -> str:
        """Return the URL below which datasets lie: the configured one, else a folder of the state directory."""
        return configuration.datasets or f"file://{find_state_directory(self.environ).path.resolve()}/datasets"

    def wake(self) -> None:
        """Start a supervisor if there is unfinished work and none is running. Failing to is only a remark."""
        if self.store.is_read_only or not self.store.has_unfinished():
            return
        from distflow.supervisor.process import ensure_supervisor, is_running

        try:
            if not is_running(self.directory):
                ensure_supervisor(self.directory, wait=False)
        except OSError as error:
            self.notify(f"warning: no supervisor could be started: {error}")

    def load_supervisor(self, backends: Iterable[str]) -> None:
        """Start a supervisor that loads its modules now, and works once ``ensure_supervisor`` is called.

        It ends with this process if that never happens. Saves the time of its start while a spec is checked.
        """
        from distflow.supervisor.process import hold_supervisor

        self._held = hold_supervisor(self.writable_directory(), backends)

    def ensure_supervisor(self) -> None:
        """Return when a supervisor is running and knows of new work. Raises ``SupervisorError``."""
        from distflow.supervisor.process import ensure_supervisor

        held, self._held = self._held, None
        ensure_supervisor(self.directory, held=held)
