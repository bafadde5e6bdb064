"""Start Python processes that have already imported torch, distflow, Ray or s3fs: forks of a process, not new interpreters.

Importing torch takes 2 to 5 s of processor time, which is most of the time of a small training. Importing distflow takes longer
than most of its commands. Otherwise the forks are ordinary processes: each has its own pid, session, arguments, environment,
working directory, output and exit code. If such a process starts Python itself (the ranks of a launcher, or the supervisor),
it forks them, too. ``preloading_server.py`` is the program of the server processes: one for each of these modules. Those for
torch and s3fs do not import distflow, so each of their forks does. The one for torch imports further modules for the first
process whose variable ``PRELOAD`` names them, separated by spaces. Tests of the start or the end of an interpreter, of
torchrun, of terminals, or of the variables that torch reads at import use ``sys.executable`` instead.

``start_preloaded`` starts such a process from a test. With the fixture ``forking_site`` in the ``PYTHONPATH`` of a task, the
interpreters of scripts and launchers delegate their work to such a process: they pass it their streams, wait, forward signals,
and exit with its code. With ``write_program``, a shell does the same for ``distflow``, the tests of Ray do it for
``ray start`` and for distflow's program on the cluster, and nodes do it for the service that transfers data. All of them import
this module, so it imports little. Ray's workers are not forked: when Ray's library is loaded, it reads the ids of the worker's
job and raylet from the environment, and never again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal, NoReturn

    Kind = Literal["torch", "distflow", "ray", "storage"]

__all__ = [
    "TRANSFORMERS", "Preloaded", "connect", "delegate", "find_forking_site", "request_start", "start_preloaded",
    "write_program", "write_site",
]  # fmt: skip

TRANSFORMERS = "transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama"
"""The value of ``PRELOAD`` for trainings of Hugging Face models."""
_ANSWER_S = 150.0
"""Time limit for the pid of a new process. The first one waits until the server has imported its modules."""


class Preloaded:
    """A started process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        connection.settimeout(_ANSWER_S)
        self.pid = int(connection.recv(32) or _raise_ended())

    def poll(self) -> int | None:
        import subprocess

        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(32) or _raise_ended())
            except (TimeoutError, BlockingIOError):
                import subprocess

                raise subprocess.TimeoutExpired("preloaded Python", timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _raise_ended() -> NoReturn:
    raise RuntimeError("the server process has ended: see preloaded-*.log in the base directory of pytest")


def start_preloaded(
    base: Path, arguments: Sequence[str], folder: Path, environment: Mapping[str, str],
    stdin: int, stdout: int, stderr: int, *, kind: Kind = "torch",
) -> Preloaded:  # fmt: skip
    """Start ``python ARGUMENTS`` in a new session, forked from a server process that all workers of pytest-xdist share.

    ``base`` is the base directory of pytest.
    """
    connection, _ = _connect_to_server(base, kind)
    request_start(connection, arguments, str(folder), environment, [stdin, stdout, stderr])
    return Preloaded(connection)


def _connect_to_server(base: Path, kind: Kind) -> tuple[socket.socket, str]:
    """Return a connection to a server process, which is started if necessary, and its address."""
    import fcntl

    top, owner = base, os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top, owner = top.parent, os.getppid()
    # Containers can mount the directory of this path. Addresses without a path belong to a network namespace.
    site = top / "forking-site"
    site.mkdir(exist_ok=True)
    address = str(site / f"{kind}.socket")
    with (top / f"preloaded-{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return connect(address) or _start_server(address, owner, top, kind), address


def request_start(
    connection: socket.socket, arguments: Sequence[str], folder: str, environment: Mapping[str, str], handles: Sequence[int],
    kept: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Request the start of ``python ARGUMENTS`` with the standard streams ``handles`` and the open files ``kept``.

    Without ``kept``, the server kills the process when ``connection`` is closed.
    """
    request = [list(arguments), folder, dict(environment), kept]
    socket.send_fds(connection, [json.dumps(request).encode()], [*handles, *(kept or ())])


def connect(address: str) -> socket.socket | None:
    """Return a connection to the server process at an address, or None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def _start_server(address: str, owner: int, top: Path, kind: Kind) -> socket.socket:
    import subprocess
    from pathlib import Path

    import distflow

    program = Path(__file__).with_name("preloading_server.py")
    environment = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    environment["PYTHONPATH"] = str(Path(distflow.__file__).parents[1])
    environment["HOME"] = str(top)  # with the home of the first test, that test would report this process as its own
    if kind == "torch":
        Path(address).with_name("sitecustomize.py").write_text(_SITE.format(folder=str(program.parent), address=address))
    Path(address).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, (top / f"preloaded-{kind}.log").open("ab") as log:
        server.bind(address)
        server.listen(64)
        server_process = subprocess.Popen(
            # The last argument and the variable reserve the memory in which a fork shows its own arguments and environment.
            [sys.executable, str(program), kind, str(server.fileno()), str(owner), "-" * 8192],
            pass_fds=[server.fileno()],
            cwd="/",
            env={**environment, "OMP_NUM_THREADS": "1", "RESERVED": "-" * 8192},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        server_process.returncode = 0  # no wait: the server ends after this process
        connection = connect(address)
    assert connection is not None
    return connection


def find_forking_site(base: Path) -> str:
    """Return a directory for ``PYTHONPATH``: forks of the server process then run scripts, launchers and their ranks.

    Each fork runs in the namespaces and cgroups of the interpreter that delegates its work. If a container does not mount this
    directory and the one of this file, its interpreters do their work themselves.
    """
    connection, address = _connect_to_server(base, "torch")
    connection.close()
    return os.path.dirname(address)


_SITE = """
import os, sys
command = [one for one in sys.orig_argv[1:] if one != "-u"]
is_launcher = command[:2] in (["-m", "distflow.train.launch"], ["-m", "torch.distributed.run"])
if is_launcher or command[:1] and command[0].endswith((".py", "/torchrun", "/accelerate")):
    sys.path.insert(0, {folder!r})
    import preloaded
    preloaded.delegate({address!r}, sys.orig_argv[1:])
"""


def write_program(folder: Path, base: Path, kind: Kind) -> Path:
    """Return the program ``distflow``, or for the other kinds ``python``, in its own directory.

    A fork of the server process runs it. For storage, ``python`` is the Python of a node, and only the service that transfers
    data is forked, from a process that has imported the driver for S3.
    """
    from pathlib import Path

    connection, address = _connect_to_server(base, kind)
    connection.close()
    name, text = ("distflow", _DISTFLOW) if kind == "distflow" else ("python", _PYTHON)
    program = folder / "forking-bin" / name
    program.parent.mkdir(exist_ok=True)
    folder_text, address_text = json.dumps(str(Path(__file__).parent)), json.dumps(address)
    forked = '"$8" = distflow.storage.node_service' if kind == "storage" else '"$1" = -c'
    program.write_text(text.format(python=sys.executable, folder=folder_text, address=address_text, forked=forked))
    program.chmod(0o755)
    return program


def write_site(folder: Path, base: Path, module: str) -> Path:
    """Return a directory for ``PYTHONPATH``: ``python -m MODULE`` then calls ``main`` in a fork of the server for distflow.

    runpy, which runs ``-m``, prints a warning if the server process has already imported the module.
    """
    connection, address = _connect_to_server(base, "distflow")
    connection.close()
    site = folder / "forking-modules"
    site.mkdir()
    tests = os.path.dirname(__file__)
    (site / "sitecustomize.py").write_text(_SITE_OF_MODULE.format(module=module, folder=tests, address=address))
    return site


_SITE_OF_MODULE = """
import sys
if sys.orig_argv[1:3] == ["-m", {module!r}]:
    sys.path.insert(0, {folder!r})
    import preloaded
    run = "import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
    preloaded.delegate({address!r}, ["-c", run, *sys.orig_argv[3:]])
"""
_DISTFLOW = """#!{python} -IS
import sys
sys.path.insert(0, {folder})
import preloaded
preloaded.delegate({address}, ["-m", "distflow", *sys.argv[1:]])
"""
_PYTHON = """#!/bin/sh
[ {forked} ] && set -- -ISc '
import sys
sys.path.insert(0, {folder})
import preloaded
preloaded.delegate({address}, sys.argv[1:])
' "$@"
exec {python} "$@"
"""
"""Fork for the program on the Ray cluster, or for the service that transfers data. Other programs import little."""


def delegate(address: str, arguments: Sequence[str]) -> NoReturn:
    """Run ``python ARGUMENTS`` in a fork of the server process, and exit with its code."""
    connection = connect(address)
    assert connection is not None
    request_start(connection, arguments, os.getcwd(), os.environ, [0, 1, 2])
    started = Preloaded(connection)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(started.pid, number))
    code = started.wait(None)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
