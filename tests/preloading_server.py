"""The server process of ``preloaded``, and the forks of it.

Its arguments are ``torch``, ``distflow``, ``ray`` or ``storage``, the descriptor of a listening socket, the process with which
the server ends, and a long text, which reserves memory for ``_show``.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import fcntl
import gc
import importlib
import itertools
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import process, util
from pathlib import Path
from typing import Any, NoReturn

from preloaded import connect, request_start

_BASIC = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)  # fmt: skip
"""The modules that the ranks of most trainings import. DDP and the optimizers import ``torch._dynamo``."""
_OF_RAY = (
    "ray._common.pydantic_compat", "ray._common.usage.usage_lib", "ray._private.arrow_serialization",
    "ray._private.runtime_env.uv_runtime_env_hook", "ray.scripts.scripts",
)  # fmt: skip
"""The modules that ``ray.init`` and ``ray start`` import. None of them starts a thread."""
_FLAGS = {"-u", "-B", "-E", "-I", "-S", "-s"}
_CAN_SHOW = "RESERVED" in os.environ


def _serve(server: socket.socket, owner: int) -> None:
    """Fork a process for each connection, and send its pid and later its exit code. Return when ``owner`` has ended.

    If a client closes its connection, kill the process, unless it was requested as a background process.
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
                request, handles, _, _ = socket.recv_fds(connection, 1 << 20, 16)
                if not request:  # only a test of the address
                    connection.close()
                    continue
                arguments, folder, environment, kept = json.loads(request)
                client = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
                pid = _start(arguments, folder, environment, handles, kept or [], client)
                if pid is None:
                    connection.close()
                    continue
                running[pid] = connection
                if kept is None:
                    selector.register(connection, selectors.EVENT_READ, pid)
                _send(connection, _pid_inside(pid))
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


def _start(
    arguments: list[str], folder: str, environment: dict[str, str], handles: list[int], kept: list[int], client: int
) -> int | None:
    """Fork a process in a new session, with the standard streams and the other files ``handles``. Return its pid.

    If ``client`` runs in other namespaces, such as those of a container, so does the process. Return None if they have ended.
    """
    modules = environment.get("PRELOAD", "").split()
    if not _LOADED.issuperset(modules):
        _fork_interpreters(modules)
    pid, namespaces = None, _open_other_namespaces(client)
    try:
        if "pid" in namespaces:
            _enter(namespaces["pid"])  # only processes that are forked from now on are in it
        pid = os.fork()
    except OSError as error:
        print(f"cannot fork for process {client}, which may have ended: {error}", file=sys.stderr, flush=True)
    if pid == 0:
        if namespaces:
            _enter_cgroups(client)
        for name in namespaces.keys() - {"pid"}:
            _enter(namespaces[name])
        os.setsid()
        _become(arguments, folder, environment, handles[:3], dict(zip(handles[3:], kept, strict=True)))
    if "pid" in namespaces:
        with open("/proc/self/ns/pid") as own:
            _enter(own.fileno())
    for handle in (*handles, *namespaces.values()):
        os.close(handle)
    return pid


def _open_other_namespaces(pid: int) -> dict[str, int]:
    """Open the namespaces of a process that are not those of this process."""
    found = {}
    with suppress(OSError):  # it has ended
        for name in ("cgroup", "ipc", "mnt", "net", "pid", "uts"):
            path = f"/proc/{pid}/ns/{name}"
            if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}"):
                found[name] = os.open(path, os.O_RDONLY)
    return found


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:  # `os.setns` needs Python 3.12
        raise OSError(ctypes.get_errno(), "setns failed")


def _enter_cgroups(pid: int) -> None:
    """Enter the cgroups of a process, so that limits and measurements of its container include this process."""
    own, others = (set(Path(f"/proc/{one}/cgroup").read_text().splitlines()) for one in ("self", pid))
    for line in others - own:
        _, controllers, path = line.split(":", 2)
        for root in (controllers.removeprefix("name="), "unified"):  # "unified" has the cgroups of version 2 next to version 1
            group = Path(f"/sys/fs/cgroup/{root}{path}/cgroup.procs")
            if group.exists():
                group.write_text("0")
                break


def _pid_inside(pid: int) -> int:
    """Return the pid that a process has in its own pid namespace."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].partition("\n")[0].split()[-1])


def _send(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.send(str(number).encode())


_fork_exec = _posixsubprocess.fork_exec


def _fork(args: Any, executables: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any) -> int:
    """Replace ``_posixsubprocess.fork_exec``: if the command is this Python, fork without starting an interpreter."""
    command = [os.fsdecode(one) for one in args]
    stdin, _, _, stdout, _, stderr, _, failed, _, start_new_session = more[:10]
    is_forked = "-S" not in command[1:3] if _address is None else start_new_session and command[1:2] == ["-m"]
    if command[0] != sys.executable or not is_forked or any(callable(one) for one in more):
        return int(_fork_exec(args, executables, close_fds, pass_fds, cwd, env, *more))
    folder, handles, kept = os.fsdecode(cwd or "."), [stdin, stdout, stderr], sorted({*pass_fds} - {failed})
    known = dict(os.environ) if env is None else dict(os.fsdecode(one).split("=", 1) for one in env)
    if _address is not None:
        return _fork_from_server(_address, command[1:], folder, known, handles, kept)
    pid = os.fork()
    if pid == 0:
        if start_new_session:
            os.setsid()
        _become(command[1:], folder, known, handles, dict(zip(kept, kept, strict=True)))
    return pid


def _fork_from_server(
    address: str, arguments: list[str], folder: str, environment: dict[str, str], handles: list[int], kept: list[int]
) -> int:
    """Fork a background process from the server: a connection to SQLite must not be carried through a fork."""
    connection = connect(address)
    assert connection is not None
    with connection:
        request_start(connection, arguments, folder, environment, [at if at >= 0 else n for n, at in enumerate(handles)], kept)
        return int(connection.recv(32))


def _become(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    handles: Sequence[int],
    kept: Mapping[int, int],
) -> NoReturn:
    """Run ``python ARGUMENTS`` in this fork and exit. The code that the parent was running never continues here.

    ``handles`` become the standard streams. ``kept`` has further descriptors, and their numbers in the new process.
    """
    _show([sys.executable, *arguments], [f"{name}={value}" for name, value in environment.items()])
    _reset_signals()
    _keep_open(handles, kept)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]
    # Only the names at the end are read, because each costs a page fault, which copies its page.
    for name in [*itertools.takewhile(lambda name: name not in _LOADED, reversed(sys.modules))]:
        del sys.modules[name]
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    if debug := sys.modules.get("torch.distributed"):
        debug.set_debug_level_from_env()  # which torch reads when it is imported
    if ray := sys.modules.get("ray._raylet"):
        ray.Config.initialize("")  # read its variables again, except the internal ones of workers
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent removes its temporary directories itself
    code = _exit_code(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _show(*texts: Sequence[str]) -> None:
    """Show these arguments and this environment in /proc, where other processes read them from the memory of this one."""
    if not _CAN_SHOW:
        return
    ends = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    for (start, end), values in zip((ends[:2], ends[2:]), texts, strict=True):
        size = end - start
        content = b"".join(os.fsencode(value) + b"\0" for value in values)
        ctypes.memmove(start, content[: size - 1].ljust(size, b"\0"), size)


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _keep_open(handles: Sequence[int], kept: Mapping[int, int]) -> None:
    """Make ``handles`` the standard streams (-1: do not change this one), and close all other files except ``kept``."""
    # Above all numbers that are wanted, so that none is replaced before it is copied.
    copies = {number: fcntl.fcntl(handle, fcntl.F_DUPFD, 500) for handle, number in kept.items()}
    for standard, handle in enumerate(handles):
        if handle not in (-1, standard):
            os.dup2(handle, standard)
    for number, copy in copies.items():
        os.dup2(copy, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in copies:
            with suppress(OSError):
                os.close(int(name))
    # The streams of the server remember what kind of file they had.
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)


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


def _fork_interpreters(modules: Iterable[str]) -> None:
    """Import ``modules``, and from now on fork Python processes instead of starting interpreters."""
    gc.disable()  # collecting garbage would take a fifth of the time and free nothing
    for module in modules:
        importlib.import_module(module)
    _LOADED.update(sys.modules)
    gc.freeze()
    gc.enable()
    subprocess._fork_exec = _posixsubprocess.fork_exec = _fork  # type: ignore[attr-defined]


def _modules_of_distflow() -> Iterator[str]:
    """Return the modules that commands and supervisors import, also those that they import when they need them."""
    import msgspec

    for module in pkgutil.walk_packages(importlib.import_module("distflow").__path__, "distflow."):
        if not module.name.startswith(_NOT_NEEDED) and not module.name.endswith("__main__"):
            yield module.name
            # msgspec inspects a struct once per process, before it decodes the first one.
            for kind in vars(sys.modules[module.name]).values():
                if isinstance(kind, type) and kind.__module__ == module.name and issubclass(kind, msgspec.Struct):
                    with suppress(Exception):  # not every class can be decoded
                        msgspec.convert({}, kind)
    yield from ("jsonschema", "encodings.idna")
    for name in ("kubernetes.client", "kubernetes.config"):
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):
        _load_s3()


def _load_s3() -> None:
    """Import the driver for S3, and let all forks use the descriptions of S3 that botocore reads for each client."""
    for module in ("s3fs", "aiobotocore.session", "botocore.handlers"):
        importlib.import_module(module)
    loader = importlib.import_module("botocore.loaders").JSONFileLoader
    load_file, found = loader.load_file, {}

    def load_once(self: Any, path: str) -> Any:
        if path not in found:
            found[path] = load_file(self, path)
        return found[path]

    loader.load_file = load_once
    importlib.import_module("botocore.session").Session().create_client(
        "s3", "us-east-1", aws_access_key_id="none", aws_secret_access_key="none"
    )


_NOT_NEEDED = ("distflow.train", "distflow.runtime", "distflow.testing", "distflow.distributed")
_PATH = sys.path[1:]
_LOADED: set[str] = set()
_address: str | None = None
"""The address of the server for distflow or Ray. Its forks request new forks there, and do not fork themselves."""

if __name__ == "__main__":
    kind, listener, owner_pid = sys.argv[1:4]
    listening = socket.socket(fileno=int(listener))
    _address = None if kind == "torch" else listening.getsockname()
    if kind == "torch":
        # Processes that wake up then do not interrupt a rank, which may hold a lock for which gloo waits in a busy loop.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    preloaded_modules = {"torch": (*_BASIC, "numpy", "torch.distributed.pipelining"), "ray": _OF_RAY, "storage": ()}
    if kind == "storage":  # ``storage.node_service`` imports distflow itself, from the node's archive
        _load_s3()
    _fork_interpreters(_modules_of_distflow() if kind == "distflow" else preloaded_modules[kind])
    _serve(listening, int(owner_pid))
