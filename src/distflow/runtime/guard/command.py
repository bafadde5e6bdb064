"""Starting an attempt's command: its environment, and the steps between fork and exec.

The child waits for a byte from the keeper before it execs the command. So the keeper records the child's id and start time
before the command starts.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat

from distflow.protocol.light_typing import AbstractSet, Dict, List, NamedTuple, Optional, Sequence, Tuple
from distflow.runtime import processes
from distflow.runtime.guard import netcat, process_tree
from distflow.runtime.guard.output import rank_variables
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json

__all__ = [
    "HEARTBEAT",
    "PLACEHOLDER",
    "Spawned",
    "environment",
    "exec_program",
    "fill_placeholders",
    "prepare_exec",
    "read_failure",
    "spawn",
    "with_prelude",
]

HEARTBEAT = "heartbeat"
"""File in the attempt's directory that programs touch as a heartbeat (``DISTFLOW_HEARTBEAT``)."""

PLACEHOLDER = "@@ATTEMPT_DIR@@"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOR_TASKS = ("PYTHONHOME", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "__PYVENV_LAUNCHER__")
"""Variables for the agent's interpreter. A task may use another interpreter."""


class Spawned(NamedTuple):
    """A child that is ready to become the command."""

    pid: int
    start: int
    go: int
    """Writing a byte here lets the child exec the command; closing it ends the child."""
    failure: int
    """Gives end of file if the exec succeeded, and the cause of the failure otherwise (see ``read_failure``)."""
    cgroup: Optional[str]
    """Path of the cgroup in which the command starts; None if it could not be created."""

    @property
    def record(self) -> Json:
        """The entry in ``runner.json``."""
        return {"pid": self.pid, "start": self.start, "cgroup": self.cgroup}


def fill_placeholders(launch: Json, directory: str) -> Json:
    """Return the launch with the attempt's directory in place of the placeholder, in all fields that may contain it."""

    def text(value: str) -> str:
        return value.replace(PLACEHOLDER, directory)

    filled = dict(launch)
    filled["argv"] = [text(a) for a in launch["argv"]]
    filled["path_prepend"] = [text(p) for p in launch.get("path_prepend") or []]
    filled["mounts"] = [text(p) for p in launch.get("mounts") or []]
    filled["path"] = [text(p) for p in launch.get("path") or []]
    filled["python_path"] = [text(p) for p in launch.get("python_path") or []]
    for name in ("env", "secret_env"):
        filled[name] = {key: text(value) for key, value in (launch.get(name) or {}).items()}
    if launch.get("shell_prelude"):
        filled["shell_prelude"] = text(launch["shell_prelude"])
    filled["files"] = [dict(f, text=text(f["text"])) if f.get("text") is not None else f for f in launch.get("files") or []]
    return filled


def environment(launch: Json, attempt: str, directory: str) -> Dict[str, str]:
    """Return the command's environment.

    The launch's variables override the node's, and ``DISTFLOW_ATTEMPT``, ``DISTFLOW_ATTEMPT_DIR`` and ``DISTFLOW_HEARTBEAT``
    override both. distflow sets ``TORCHELASTIC_ERROR_FILE`` only if neither sets it.

    With a container, PATH is based on the node's PATH, which is used to find the container program. The launch's own PATH
    applies inside the container.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("DISTFLOW_") and k not in _NOT_FOR_TASKS}
    path = env.get("PATH") or _DEFAULT_PATH
    env.update(launch["env"])
    env.update(launch.get("secret_env") or {})
    if not launch.get("container"):
        path = env.get("PATH") or path
    own = netcat.add_to(directory) if attempt else ""
    env["PATH"] = ":".join([*(launch.get("path") or []), *(launch.get("path_prepend") or []), path, *filter(None, [own])])
    if launch.get("python_path"):
        env["PYTHONPATH"] = ":".join([*filter(None, [env.get("PYTHONPATH")]), *launch["python_path"]])
    env.setdefault("TORCHELASTIC_ERROR_FILE", os.path.join(directory, "error.json"))
    env["DISTFLOW_ATTEMPT"] = attempt
    env["DISTFLOW_ATTEMPT_DIR"] = directory
    env["DISTFLOW_HEARTBEAT"] = os.path.join(directory, HEARTBEAT)
    return env


def with_prelude(argv: List[str], prelude: Optional[str], env: Dict[str, str]) -> List[str]:
    """Return a command line that runs the prelude, if any, in bash (in sh if bash is missing), and then execs ``argv``."""
    if not prelude:
        return list(argv)
    shell = processes.find_program("bash", env["PATH"]) or "/bin/sh"
    return [shell, "-c", prelude + '\nexec "$@"', "sh", *argv]


def spawn(launch: Json, attempt: str, directory: str, output: int, umask: int) -> Spawned:
    """Fork the child and wait until it is in its own session.

    Raises ``OSError`` if no process can be created, and ``OpError`` if the node cannot run the task's container.
    """
    env = environment(launch, attempt, directory)
    argv = list(launch["argv"])
    if not launch.get("container"):
        env.update(rank_variables(directory, output, env))
    else:
        from distflow.runtime.guard import containers

        argv = containers.wrap(launch, attempt, directory, env)
    argv = with_prelude(argv, launch.get("shell_prelude"), env)
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    go_read, go_write = os.pipe()
    failure_read, failure_write = os.pipe()
    keeper = os.getpid()
    # A signal between fork and the child's own reset would run the keeper's handlers in the child.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_command(argv, env, cwd, output, umask, keeper, go_read, failure_write)
    except OSError:
        for fd in (go_read, go_write, failure_read, failure_write):
            os.close(fd)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    os.close(go_read)
    os.close(failure_write)
    os.read(failure_read, 1)  # the child writes a byte when it is ready; at end of file, it was killed before that
    os.set_blocking(failure_read, False)
    process = processes.read_process(pid)
    return Spawned(pid, process.start if process else 0, go_write, failure_read, process_tree.enclose(pid, directory))


def _become_command(
    argv: List[str], env: Dict[str, str], cwd: str, output: int, umask: int, keeper: int, go: int, failure: int
) -> None:
    code, message, ready = 126, "the child process failed before the program was started", b"r"
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        # If keeper and runner die together, the kernel still kills the command.
        prepare_exec((null, output, output), {go, failure}, umask, keeper)
        processes.rename_self("df-command")
        os.write(failure, ready)
        ready = b""
        if not os.read(go, 1):
            os._exit(126)  # the keeper died or closed the pipe before it wrote the byte
        code, message = exec_program(argv, env, cwd)
    except BaseException as error:  # this copy of the keeper must not continue with the keeper's code
        message = "{}: {!r}".format(message, error)
    finally:
        os.write(failure, ready + json.dumps({"exit_code": code, "message": message[:2000]}).encode()[:4000])
        os._exit(code)


def prepare_exec(streams: Sequence[int], keep: AbstractSet[int], umask: int, parent: int) -> None:
    """Prepare this forked process for the exec of a command. Exits if ``parent`` is dead.

    The process gets its own session, ``streams`` as standard input, output and error, the login's limit of open files, and
    default signals. All other descriptors except ``keep`` are closed. The kernel kills the process when ``parent`` dies.
    """
    signal.set_wakeup_fd(-1)
    os.setsid()
    if not processes.die_with_parent(signal.SIGKILL, parent):
        os._exit(126)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    processes.close_all_but(keep)
    processes.reset_descriptor_limit()
    os.umask(umask)
    processes.reset_signals()


def exec_program(argv: List[str], env: Dict[str, str], cwd: str) -> Tuple[int, str]:
    """Execute the program in ``cwd``. Returns only on failure: the exit code 126 or 127, as in shells, and a message."""
    try:
        os.chdir(cwd)
    except OSError as error:
        return 126, "cannot enter the working directory `{}`: {}".format(cwd, error.strerror)
    name = argv[0]
    candidates = [name] if "/" in name else [os.path.join(p or ".", name) for p in env["PATH"].split(":")]
    refused: Optional[str] = None
    for candidate in candidates:
        try:
            os.execve(candidate, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.isfile(candidate):
                cause = "the interpreter in its first line (`#!`), or the loader of this binary, does not exist on this node"
                return 127, "`{}`: {}".format(candidate, cause)
        except PermissionError:
            refused = candidate
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                cause = "it is not a program for this machine and has no `#!` line"
                hint = "if it is a script, start it with its interpreter, such as `bash {}`".format(name)
                return 126, "`{}`: {}; {}".format(candidate, cause, hint)
            return 126, "`{}`: {}".format(candidate, error.strerror)
    if refused is not None:
        return 126, _why_refused(refused)
    if "/" in name:
        start = "" if name.startswith("/") else "; relative paths start in the task's working directory"
        return 127, "`{}` does not exist on this node{}".format(name, start)
    searched = ":".join(path for path in dict.fromkeys(env["PATH"].split(":")) if not path.endswith("/" + netcat.TOOLS))
    hint = "install it, or add its directory to PATH in the node's `setup`"
    return 127, "program `{}` not found on this node in PATH={}; {}".format(name, searched, hint)


def _why_refused(path: str) -> str:
    """Return why the kernel refused to execute ``path``, and the remedy if it is known."""
    try:
        is_directory, flags = stat.S_ISDIR(os.stat(path).st_mode), os.statvfs(path).f_flag
    except OSError as error:
        return "`{}`: {}".format(path, error.strerror)
    if is_directory:
        return "`{}` is a directory; name a program in it".format(path)
    if flags & os.ST_NOEXEC:
        remedy = "copy it elsewhere, or start a script with its interpreter"
        return "`{}` is on a file system that is mounted with `noexec`; {}".format(path, remedy)
    if os.access(path, os.X_OK):
        return "`{}` cannot start, because the interpreter in its first line (`#!`) is not executable".format(path)
    return "`{}` is not executable; run `chmod +x` on it, or start it with its interpreter".format(path)


def read_failure(fd: int) -> Optional[Json]:
    """Return the exit code and the message of a failed exec; None without a failure. Call it after the child has ended."""
    text = b""
    while True:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            break
        if not data:
            break
        text += data
    if not text:
        return None
    try:
        return dict(decode_object(text))
    except ValueError:
        return {"exit_code": 126, "message": text.decode("utf-8", "replace")}
