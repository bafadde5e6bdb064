"""Start Python processes that have already imported torch: they are forked from one process instead of started anew.

Importing torch takes 2 to 5 s of processor time, which is most of the time of a small training. Otherwise the forks are
ordinary processes: each has its own pid, session, arguments, environment, working directory, output and exit code. If such a
process starts Python itself (the ranks of a launcher), it forks them, too. Only torch is preloaded, so each process imports
distflow again. The server imports further modules for the first process whose variable ``PRELOAD`` names them, separated by
spaces. Tests of the start or the end of an interpreter, of torchrun, or of the variables that torch reads at import use
``sys.executable`` instead.

``start_preloaded`` starts such a process from a test. With the fixture ``forking_site`` in the ``PYTHONPATH`` of a task, the
interpreters of scripts and launchers delegate their work to such a process: they pass it their streams, wait, forward signals,
and exit with its code.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import process, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import pytest

__all__ = ["TRANSFORMERS", "Preloaded", "fork_interpreters", "start_preloaded", "write_forking_site"]

_BASIC = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)  # fmt: skip
"""The modules that the ranks of most trainings import. DDP and the optimizers import ``torch._dynamo``."""
TRANSFORMERS = "transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama"
"""The value of ``PRELOAD`` for trainings of Hugging Face models."""
_FLAGS = {"-u", "-B", "-E", "-I", "-s"}
_ANSWER_S = 150.0
"""Time limit for the pid of a new process. The first one waits until the server has imported torch."""


class Preloaded:
    """A started process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        connection.settimeout(_ANSWER_S)
        self.pid = int(connection.recv(32) or _raise_ended())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(32) or _raise_ended())
            except (TimeoutError, BlockingIOError):
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
    raise RuntimeError("the server process has ended: see preloaded.log in the base directory of pytest")


def start_preloaded(
    temporary: pytest.TempPathFactory, arguments: Sequence[str], folder: Path, environment: Mapping[str, str],
    stdin: int, stdout: int, stderr: int,
) -> Preloaded:  # fmt: skip
    """Start ``python ARGUMENTS`` in a new session, forked from the server process that all workers of pytest-xdist share."""
    connection, _ = _connect_to_server(temporary)
    _request_start(connection, arguments, str(folder), environment, [stdin, stdout, stderr])
    return Preloaded(connection)


def _connect_to_server(temporary: pytest.TempPathFactory) -> tuple[socket.socket, str]:
    """Return a connection to the server process, which is started if necessary, and its address."""
    top, owner = temporary.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top, owner = top.parent, os.getppid()
    address = f"\0distflow-preloaded-{owner}-{top}"[:100]
    with (top / "preloaded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _connect(address) or _start_server(address, owner, top), address


def _request_start(
    connection: socket.socket, arguments: Sequence[str], folder: str, environment: Mapping[str, str], handles: Sequence[int]
) -> None:
    socket.send_fds(connection, [json.dumps([list(arguments), folder, dict(environment)]).encode()], handles)


def _connect(address: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def _start_server(address: str, owner: int, top: Path) -> socket.socket:
    environment = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    environment["HOME"] = str(top)  # with the home of the first test, that test would report this process as its own
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, (top / "preloaded.log").open("ab") as log:
        server.bind(address)
        server.listen(64)
        server_process = subprocess.Popen(
            [sys.executable, __file__, str(server.fileno()), str(owner)],
            pass_fds=[server.fileno()],
            cwd="/",
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        server_process.returncode = 0  # no wait: the server ends after this process
        connection = _connect(address)
    assert connection is not None
    return connection


def write_forking_site(folder: Path, temporary: pytest.TempPathFactory) -> str:
    """Return a directory for ``PYTHONPATH``: forks of the server process then run scripts, launchers and their ranks.

    A launcher in other namespaces, such as those of a container, imports torch once instead, and forks its ranks.
    """
    connection, address = _connect_to_server(temporary)
    connection.close()
    place = folder / "forking-site"
    place.mkdir()
    text = _SITE.format(folder=str(Path(__file__).parent), address=address, namespaces=_namespaces(), basic=_BASIC)
    (place / "sitecustomize.py").write_text(text)
    return str(place)


_SITE = """
import os, sys
command = [one for one in sys.orig_argv[1:] if one != "-u"]
is_launcher = command[:2] in (["-m", "distflow.train.launch"], ["-m", "torch.distributed.run"])
if is_launcher or command[:1] and command[0].endswith((".py", "/torchrun", "/accelerate")):
    sys.path.insert(0, {folder!r})
    import preloaded
    sys.path.remove({folder!r})
    if preloaded._namespaces() == {namespaces!r}:
        preloaded.delegate({address!r}, sys.orig_argv[1:])
    elif is_launcher or command[0].endswith("train_dist.py"):
        preloaded.fork_interpreters({basic!r})
"""


def _namespaces() -> list[str]:
    return [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]


def delegate(address: str, arguments: Sequence[str]) -> NoReturn:
    """Run ``python ARGUMENTS`` in a fork of the server process, and exit with its code."""
    connection = _connect(address)
    assert connection is not None
    _request_start(connection, arguments, os.getcwd(), os.environ, [0, 1, 2])
    started = Preloaded(connection)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(started.pid, number))
    code = started.wait(None)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


# -- in the server process and its forks -------------------------------------------------------------------------------


def _serve(server: socket.socket, owner: int) -> None:
    """Fork a process for each connection, and send its pid and later its exit code. Return when ``owner`` has ended.

    If a client closes its connection, kill the process.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    selector.register(reader, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while os.path.exists(f"/proc/{owner}"):
        for key, _ in selector.select(1.0):
            if key.fileobj is server:
                connection, _ = server.accept()
                request, handles, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                if not request:  # only a test of the address
                    connection.close()
                    continue
                arguments, folder, environment = json.loads(request)
                modules = environment.get("PRELOAD", "").split()
                if not _LOADED.issuperset(modules):
                    fork_interpreters(modules)
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    _become(arguments, folder, environment, handles)
                for handle in handles:
                    os.close(handle)
                running[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                _send(connection, pid)
            elif key.fileobj is reader:
                reader.recv(4096)
            else:
                selector.unregister(key.fileobj)
                for kill in (os.kill, os.killpg):
                    with suppress(ProcessLookupError):
                        kill(key.data, signal.SIGKILL)
        for pid in tuple(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid) as connection:
                    with suppress(KeyError):  # the other end is closed
                        selector.unregister(connection)
                    _send(connection, os.waitstatus_to_exitcode(status))


def _send(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.send(str(number).encode())


_fork_exec = _posixsubprocess.fork_exec


def _fork(args: Any, executables: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any) -> int:
    """Replace ``_posixsubprocess.fork_exec``: if the command is this Python, fork without starting an interpreter."""
    command = [os.fsdecode(one) for one in args]
    if command[0] != sys.executable or any(callable(one) for one in more):
        return int(_fork_exec(args, executables, close_fds, pass_fds, cwd, env, *more))
    stdin, _, _, stdout, _, stderr, _, failed, _, start_new_session = more[:10]
    pid = os.fork()
    if pid == 0:
        if start_new_session:
            os.setsid()
        known = dict(os.environ) if env is None else dict(os.fsdecode(one).split("=", 1) for one in env)
        _become(command[1:], os.fsdecode(cwd or "."), known, [stdin, stdout, stderr], {*pass_fds} - {failed})
    return pid


def _become(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    handles: Sequence[int],
    kept: Collection[int] = (),
) -> NoReturn:
    """Run ``python ARGUMENTS`` in this fork and exit. The code that the parent was running never continues here."""
    _reset_signals()
    _keep_open(handles, kept)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]
    for name in sys.modules.keys() - _LOADED:
        del sys.modules[name]
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    if debug := sys.modules.get("torch.distributed"):
        debug.set_debug_level_from_env()  # which torch reads when it is imported
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent removes its temporary directories itself
    code = _exit_code(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _keep_open(handles: Sequence[int], kept: Collection[int]) -> None:
    """Make ``handles`` the standard streams (-1: do not change this one), and close all other files except ``kept``."""
    for standard, handle in enumerate(handles):
        if handle not in (-1, standard):
            os.dup2(handle, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def _exit_code(arguments: list[str]) -> int:
    try:
        _run(arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    """Run a script, a module (``-m``) or a text (``-c``) as ``__main__``."""
    while arguments[0] in _FLAGS:
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if arguments[0] == "-c":
        sys.path.insert(0, "")
        name, source, sys.argv = "<string>", arguments[1].encode(), ["-c", *arguments[2:]]
    else:
        name, sys.argv = arguments[0], arguments
        sys.path.insert(0, str(Path(name).resolve().parent))
        source, main.__file__ = Path(name).read_bytes(), name
    exec(compile(source, name, "exec"), vars(main))


def fork_interpreters(modules: Collection[str]) -> None:
    """Import ``modules``, and from now on fork Python processes instead of starting interpreters."""
    gc.disable()  # collecting garbage would take a fifth of the time and free nothing
    for module in modules:
        importlib.import_module(module)
    _LOADED.update(sys.modules)
    gc.freeze()
    gc.enable()
    subprocess._fork_exec = _posixsubprocess.fork_exec = _fork  # type: ignore[attr-defined]


_PATH = sys.path[1:]
_LOADED: set[str] = set()

if __name__ == "__main__":
    fork_interpreters((*_BASIC, "numpy", "torch.distributed.pipelining"))
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
