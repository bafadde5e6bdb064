"""The ``Client``: access to the state directory, its store, the configuration and the supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import InputError, SupervisorError
from distflow.state.directory import StateDirectory, find_state_directory
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.documents.notify import NotifyTarget
    from distflow.pools.hostfile import Host
    from distflow.pools.model import Configuration
    from distflow.state.mirror import Mirror
    from distflow.state.store import Store
    from distflow.storage.credentials import CredentialsFor
    from distflow.supervisor.process import PreloadedSupervisor

__all__ = ["Client", "now", "state_directory_of", "user_name"]


def now() -> float:
    """Return the time in seconds since the epoch (UTC). Clock changes while this process runs do not affect it."""
    from distflow.backends import steady

    return steady.now()


_MANY_SUPERVISORS = 3


def user_name() -> str:
    """Return the name of this user. In a container without user names, return the numeric user id."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def state_directory_of(environ: Mapping[str, str]) -> StateDirectory:
    """Return the state directory for these environment variables, without creating or checking it."""
    return find_state_directory(environ)


def _ignore(_: str) -> None:
    """Discard a message."""


class Client:
    """This user's workflows on this machine, as a context manager. Most functions of ``distflow.client`` need one.

    It opens files only when they are needed. Use a client from one thread only. Many functions start a background supervisor if
    there is unfinished work and no supervisor is running.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
        notify: Callable[[str], None] = _ignore,
    ) -> None:
        """Create a client without opening any file.

        Args:
            folder: The directory where the search for the configuration starts. Default: the working directory at each call.
            environ: Environment variables such as ``DISTFLOW_STATE`` and ``DISTFLOW_CONFIG``. Default: those of this process.
            notify: Called with each note and warning, such as ``warning: …``. Default: discard them.

        """
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.notify = notify
        self._folder = folder
        self._directory: StateDirectory | None = None
        self._store: Store | None = None
        self._preloaded: PreloadedSupervisor | None = None
        self._supervisors_started = 0

    def __enter__(self) -> Client:
        """Return the client. It opens the store on first use."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the store. End the supervisor that ``load_supervisor`` started, unless ``ensure_supervisor`` has used it."""
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is not None:
            preloaded.stop()
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def directory(self) -> StateDirectory:
        """The state directory, for reading. It is created if it has no store.

        A store of another user is accepted only if this user cannot write to it. Otherwise, distflow would run with this user's
        permissions in a directory that the other user controls. Raises ``StateError``.
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
        """Return the state directory after creating it if needed and checking that it is writable. Raises ``StateError``."""
        self._directory = find_state_directory(self.environ).ensure()
        return self._directory

    @property
    def store(self) -> Store:
        """The store of records, opened on first use. Raises ``StateError``."""
        if self._store is None:
            from distflow.state.store import Store  # it imports sqlite3 and msgspec, which many calls do not need

            self._store = Store(self.directory.store)
            if self._store.is_read_only:
                self.notify(f"note: {self._store.path} is not writable: no supervisor is started, and every status may be old")
        return self._store

    @property
    def mirror(self) -> Mirror:
        """The copies of tasks' logs on this machine."""
        from distflow.state.mirror import Mirror

        return Mirror(self.directory.logs)

    def configuration(self, *, profile: bool = True, names_only: bool = False) -> Configuration:
        """Read the configuration that applies in the client's folder.

        Args:
            profile: Whether the preferred pool of the user's profile replaces the configured default pool.
            names_only: Whether only the names of pools and nodes are used. The check against the schema is omitted, which is
                faster, so other values may be invalid.

        Raises:
            InputError: if the client has no ``folder`` and the working directory no longer exists, or if another user could
                have written the configuration.
            ProblemsFound: if the configuration is wrong.
            StateError: if the profile cannot be read.

        """
        from distflow.pools.load import load_configuration

        try:
            folder = self._folder or Path.cwd()
        except FileNotFoundError:
            raise InputError("the working directory no longer exists", hint="change to an existing directory") from None
        found = load_configuration(folder, self.environ, names_only=names_only)
        preferred = self.preferred_pool() if profile else None
        if preferred is None or preferred == found.default_pool:
            return found
        if preferred not in found.pools:
            where = found.file or "the built-in configuration"
            self.notify(f"note: {where} does not have the default pool of your profile, `{preferred}`")
            return found
        return replace(found, default_pool=preferred)

    def preferred_pool(self) -> str | None:
        """Return the preferred pool of this user's profile, or ``None``. Raises ``StateError``."""
        from distflow.state.directory import read_profile

        found = read_profile(find_state_directory(self.environ).profile).get("pool")
        return str(found) if found else None

    def profile_notify(self) -> tuple[NotifyTarget, ...]:
        """Return the entries of ``notify`` in this user's profile. Raises ``ProblemsFound`` or ``StateError``."""
        from distflow.state.directory import read_profile

        file = find_state_directory(self.environ).profile
        found = read_profile(file).get("notify")
        if not found:
            return ()
        from distflow.pools.load import parse_profile_notify

        return parse_profile_notify(found, str(file))

    def hosts(self, hostfile: str | None) -> tuple[Host, ...] | None:
        """Read a hostfile, or return ``None`` for ``None``. Raises ``ProblemsFound``."""
        if hostfile is None:
            return None
        from distflow.pools.load import load_hostfile

        return load_hostfile(hostfile)

    def credentials_for(self) -> CredentialsFor:
        """Return a function that finds this user's stored credentials for a URL profile, such as ``s3://bucket``.

        The function returns ``None`` if there are none. The storage driver then uses the environment, files and roles of this
        machine. Raises ``StateError`` if another user owns the state directory with the stored credentials.
        """
        from distflow.state.credentials import data_credentials

        directory = find_state_directory(self.environ)
        if directory.credentials.exists():
            directory.check_owner()  # credentials of another user could send this user's data to that user's servers
        return data_credentials(directory.credentials)

    def datasets_url(self, configuration: Configuration) -> str:
        """Return the base URL of datasets: the configured URL, or else a folder of the state directory."""
        return configuration.datasets or f"file://{find_state_directory(self.environ).path.resolve()}/datasets"

    def wake(self) -> None:
        """Start a supervisor if there is unfinished work and none is running, and do not wait for it.

        Also start a process that sends pending notifications. Do nothing if the store is read-only. Warn through
        ``notify`` if a process cannot be started, or if supervisors end again and again. Raises ``StateError``.
        """
        if self.store.is_read_only:
            return
        if self.store.has_notifications():
            self._send_notifications()
        if not self.store.has_unfinished():
            return
        from distflow.supervisor.process import ensure_supervisor, is_running, start_errors

        try:
            with start_errors(self.directory):
                is_missing = not is_running(self.directory)
            if is_missing:
                ensure_supervisor(self.directory, wait=False)
                self._supervisors_started += 1
                if self._supervisors_started == _MANY_SUPERVISORS:
                    self.notify(
                        f"warning: supervisors end again and again ({_MANY_SUPERVISORS} were started); running tasks continue,"
                        f" but nothing else happens. See the last error in {self.directory.supervisor_log}"
                    )
        except SupervisorError as error:
            self.notify(f"warning: {error.message}")

    def _send_notifications(self) -> None:
        from distflow.supervisor.process import detach
        from distflow.supervisor.sending import start_sender

        try:
            process = start_sender(self.directory)
        except OSError as error:
            self.notify(f"warning: notifications cannot be sent: {error}")
            return
        if process is not None:
            detach(process)

    def load_supervisor(self) -> None:
        """Start a supervisor process that imports its modules now and starts work when ``ensure_supervisor`` is called.

        Do nothing if a supervisor is already running. The new process starts while the caller reads the configuration and
        checks a spec, which saves time. If ``ensure_supervisor`` is never called, the process ends when the client is closed.

        Raises:
            StateError: if the state directory is not writable.
            SupervisorError: if the process cannot be started.

        """
        from distflow.supervisor.process import preload_supervisor

        self._preloaded = preload_supervisor(self.writable_directory())

    def load_backends(self, configuration: Configuration, *, with_hosts: bool) -> None:
        """Let the supervisor that ``load_supervisor`` started import the modules of backends.

        Args:
            configuration: The pools whose backends it imports.
            with_hosts: Whether the hosts of a hostfile replace the pools.

        """
        if self._preloaded is not None:
            self._preloaded.load_backends(["ssh"] if with_hosts else [pool.backend for pool in configuration.pools.values()])

    def stop_outdated_supervisor(self) -> None:
        """End a supervisor of an older version of distflow. It might ignore features of the workflow that is stored next.

        Raises ``SupervisorError`` if it does not end.
        """
        from distflow.supervisor.process import stop_outdated_supervisor

        old = stop_outdated_supervisor(self.directory)
        if old is not None:
            self.notify(f"note: the supervisor of distflow {old} is replaced by one of this version; tasks continue")

    def ensure_supervisor(self) -> None:
        """Wait until a supervisor is running and has been notified of new work.

        Raises ``SupervisorError`` if it does not start.
        """
        from distflow.supervisor.process import ensure_supervisor

        preloaded, self._preloaded = self._preloaded, None
        ensure_supervisor(self.directory, preloaded=preloaded)
