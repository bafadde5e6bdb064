"""The builder of Python environments (``files.venvs``). It runs on its own connection, and stops when the connection ends.

Two processes hold the lock of the environment: a worker builds the environment, and the worker's parent kills all processes
that the worker leaves.

Standard input: a line ``{"venv", "file", "lines", "constraints", "env", "path_prepend", "shell_prelude", "limit_s"}``, where
``venv`` is the digest of the requirements and of the variables ``PIP_…`` and ``UV_…``. Standard output: lines
``{"building": text, "seconds": n}`` every two seconds, then ``{"built": tool, "seconds": n}``, where ``tool`` is empty if the
environment already existed, or ``{"error": {"kind", "message"}}``. See docs/agent-protocol.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

from distflow.protocol.light_typing import Dict, List, Tuple
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import root_directory, venvs
from distflow.runtime.files.safe_files import open_locked, publish
from distflow.runtime.guard import command
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.services.frames import Gone, Peer
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE, Json, OpError

__all__ = ["serve"]

_REPORT_S = 2.0
_POLL_S = 0.2
_LOG = "build.log"
_SHOWN_LINES = 12
_SHOWN_BYTES = 8192
_SHOWN_CHARACTERS = 500
_LONGEST_CONFIGURATION = 1 << 20
_UV_INDEX = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_CONFIG_FILE")
_PIP_INDEX = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS")
_INDEX_SETTING = r"(?m)^\s*(index-url|extra-index-url|no-index|find-links)\s*[=:]"
_SECRET = r"(?i)(://)[^/\s]*(@)|([?&][^=&\s]*(?:token|key|sig|signature|password|passwd|secret)=)[^&#\s]*"


def serve(root: str, umask: int) -> None:
    """Build one environment, unless it exists already."""
    processes.rename_self("df-venv")
    peer = Peer()
    try:
        peer.send(_serve(root, peer, umask))
    except Gone:
        sys.exit(1)


def _serve(root: str, peer: Peer, umask: int) -> Json:
    try:
        request = decode_object(peer.line(MAX_LINE), max_bytes=MAX_LINE)
        return _Build(root, peer, umask, request).run()
    except OpError as error:
        return {"error": error.as_json()}
    except OSError as error:
        return {"error": OpError.from_os(error, "cannot build the Python environment").as_json()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return {"error": OpError("bad_request", "the request is malformed: {!r}".format(error)).as_json()}


class _Build:
    def __init__(self, root: str, peer: Peer, umask: int, request: Json) -> None:
        self._peer = peer
        self._umask = umask
        self._began_at = time.monotonic()
        self._reported_at = 0.0
        self._limit_s = float(request["limit_s"])
        self._locked_at = self._began_at
        self._directory = venvs.directory_of(root, request["venv"])
        self._env_directory = os.path.join(self._directory, venvs.ENV)
        self._file = str(request["file"])
        self._texts = {
            name + ".txt": "".join(str(line) + "\n" for line in request[key] or [])
            for name, key in (("requirements", "lines"), ("constraints", "constraints"))
        }
        self._prelude = request.get("shell_prelude")
        variables = dict(request.get("env") or {})
        launch = {"env": variables, "path_prepend": request.get("path_prepend") or []}
        self._environment = command.environment(launch, "", root)
        for name in ("DISTFLOW_ATTEMPT", "DISTFLOW_ATTEMPT_DIR", "DISTFLOW_HEARTBEAT", "TORCHELASTIC_ERROR_FILE"):
            self._environment.pop(name, None)

    def run(self) -> Json:
        """Build the environment, unless it exists already. Returns the reply."""
        top = os.path.dirname(self._directory)
        os.makedirs(top, mode=0o700, exist_ok=True)
        if not root_directory.is_own_directory(top):
            message = "`{}` is not a directory that this user owns; remove it, or set another `root`"
            raise OpError("permission", message.format(top))
        lock = self._lock()
        self._locked_at = time.monotonic()
        _continue_in_worker()
        try:
            if venvs.is_complete(self._directory):
                venvs.touch(self._directory)
                return {"built": "", "seconds": self._seconds}
            self._remove()
            try:
                return {"built": self._build(), "seconds": self._seconds}
            except BaseException:
                with contextlib.suppress(OSError, OpError):
                    self._remove()  # it may be large, and a partial environment is useless
                    os.unlink(venvs.lock_of(self._directory))
                raise
        finally:
            os.close(lock)

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_at, 1)

    def _check_limit(self, text: str) -> None:
        """Raise ``timeout`` after the time limit. The time in which other processes built the environment does not count."""
        if time.monotonic() - self._locked_at > self._limit_s:
            message = "the Python environment was not ready after {:.0f} s (`venv_timeout`); last line of the installation: {}"
            raise OpError("timeout", message.format(self._limit_s, text))

    def _report(self, text: str) -> None:
        """Report the progress, at most every ``_REPORT_S`` seconds. Raises ``Gone``."""
        self._peer.check()
        if time.monotonic() - self._reported_at >= _REPORT_S:
            self._reported_at = time.monotonic()
            self._peer.send({"building": text, "seconds": self._seconds})

    def _lock(self) -> int:
        """Wait until no other process builds or removes this environment, and lock it."""
        while True:
            lock = open_locked(venvs.lock_of(self._directory))
            if lock is not None:
                return lock
            self._report("another node or workflow is building it")
            self._peer.check(_POLL_S)

    def _remove(self) -> None:
        """Remove a half-built environment."""
        if not os.path.lexists(self._directory):
            return
        if not root_directory.is_own_directory(self._directory) or not (
            root_directory.is_marked(self._directory)
            # Or its builder was killed before it had written the marker.
            or all(re.fullmatch(r"\.distflow\.[0-9]+", name) for name in os.listdir(self._directory))
        ):
            raise OpError("permission", "`{}` does not belong to distflow; remove it".format(self._directory))
        shutil.rmtree(self._directory)

    def _build(self) -> str:
        """Build the environment, and return the name of the tool that was used."""
        os.mkdir(self._directory, 0o700)
        root_directory.mark(self._directory)
        for name, text in self._texts.items():
            with open(os.path.join(self._directory, name), "w", encoding="utf-8") as file:
                file.write(text)
        tool, commands = self._commands()
        for argv in commands:
            self._execute(tool, argv)
        record = {
            "file": self._file,
            "python": sys.version.split()[0],
            "tool": tool,
            "seconds": self._seconds,
            "built_at": now(),
        }
        # Without this, a power cut can leave empty files in an environment that counts as complete.
        processes.sync_file_system(self._directory)
        with open(os.path.join(self._directory, venvs.COMPLETE + ".new"), "w", encoding="utf-8") as file:
            json.dump(record, file)
            publish(file, os.path.join(self._directory, venvs.COMPLETE))
        return tool

    def _commands(self) -> Tuple[str, List[List[str]]]:
        found = venvs.tools(self._environment["PATH"])
        env = self._env_directory
        python = os.path.join(env, "bin", "python")
        names = ["-r", "requirements.txt"] + (["-c", "constraints.txt"] if self._texts["constraints.txt"] else [])
        needs_pip = _only_pip_knows_the_index(self._environment, _pip_configurations(self._environment))
        if found["uv"] and not (found["pip"] and needs_pip):
            uv = found["uv"]
            return "uv", [
                [uv, "venv", "--no-project", "--python", sys.executable, env],
                [uv, "pip", "install", "--python", python, *names],
            ]
        if not found["pip"]:
            message = "{} cannot build a Python environment: it has no `ensurepip`, and there is no uv; {}"
            raise OpError("venv_failed", message.format(sys.executable, venvs.REMEDY))
        install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        return "pip", [[sys.executable, "-m", "venv", env], [*install, *names]]

    def _execute(self, tool: str, argv: List[str]) -> None:
        """Run a command until it ends or the time limit is over. Its output goes to the log in the environment's directory."""
        parent = os.getpid()

        def prepare() -> None:
            processes.die_with_parent(signal.SIGKILL, parent)
            processes.reset_descriptor_limit()
            os.umask(self._umask)

        path = os.path.join(self._directory, _LOG)
        with open(path, "ab") as log:
            process = subprocess.Popen(
                command.with_prelude(argv, self._prelude, self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._directory,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
            )
        try:
            while True:
                try:
                    code = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    text = (_last_lines(path) or ["creating it"])[-1]
                    self._check_limit(text)
                    self._report(text)
        finally:
            _kill_descendants()
        if code != 0:
            lines = _last_lines(path) or ["it printed nothing"]
            message = "cannot build the Python environment of {}: {} failed with exit code {}:\n{}"
            code = code if code >= 0 else 128 - code
            failed = "`python -m venv`" if argv[1:3] == ["-m", "venv"] else tool
            raise OpError("venv_failed", message.format(self._file, failed, code, "\n".join(lines)))


def _continue_in_worker() -> None:
    """Fork, and return only in the child. The parent waits for the child, kills the processes that it left, and exits."""
    parent = os.getpid()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    worker = os.fork()
    if worker == 0:
        processes.adopt_orphans()
        if not processes.die_with_parent(signal.SIGTERM, parent):
            raise Gone
        return
    code = 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
        status = os.waitpid(worker, 0)[1]
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1
        _kill_descendants()
    finally:
        os._exit(code)


def _kill_descendants() -> None:
    """Kill the processes that a build left, such as compilers of a killed pip or an ``ssh-agent`` that the prelude started."""
    me = os.getpid()
    killer = TreeKiller(lambda found: processes.only_descendants(found, me), lambda one: processes.is_below(one, me))
    while processes.reap()[1] and killer.step() and not killer.is_over:
        select.select([], [], [], killer.pause_s)


def _pip_configurations(environment: Dict[str, str]) -> List[str]:
    """Return the usual paths of pip's configuration files."""
    home = os.path.expanduser("~")
    own = environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    places = ["/etc/pip.conf", "/etc/xdg/pip/pip.conf", home + "/.pip/pip.conf", own + "/pip/pip.conf"]
    return places + [path for path in [environment.get("PIP_CONFIG_FILE")] if path]


def _only_pip_knows_the_index(environment: Dict[str, str], configurations: List[str]) -> bool:
    """Return whether variables or configuration files of pip name the index of packages, and no variable of uv does."""
    if any(environment.get(name) for name in _UV_INDEX):
        return False
    if any(environment.get(name) for name in _PIP_INDEX):
        return True
    for path in configurations:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                if re.search(_INDEX_SETTING, file.read(_LONGEST_CONFIGURATION)):
                    return True
        except OSError:
            continue
    return False


def _last_lines(path: str) -> List[str]:
    """Return the last lines of a log that are not empty, without passwords in URLs."""
    try:
        with open(path, "rb") as file:
            before = max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES)
            file.seek(before)
            text = file.read(_SHOWN_BYTES).decode("utf-8", "replace").replace("\r", "\n")
    except OSError:
        return []
    # The first line may be cut inside a URL, so that its password would not be recognized.
    lines = text.split("\n")[1 if before else 0 :]
    lines = [line.rstrip() for line in lines if line.strip()][-_SHOWN_LINES:]
    return [re.sub(_SECRET, r"\1\3****\2", line)[-_SHOWN_CHARACTERS:] for line in lines]
