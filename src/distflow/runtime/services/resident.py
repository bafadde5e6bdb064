"""The resident program of an allocation. It runs on each node of the allocation and starts commands until the allocation ends.

The script of a Slurm job contains the text of this file and runs it once, as ``batch``. ``batch`` starts ``node`` on each node,
in one step of the job, and ends the job when no node has had a process or a connection for some time. A single node cannot
decide this: while another node is busy, the supervisor may still collect this node's output. A supervisor that no longer needs
the job ends it earlier, with the exit code of its gang. In a container, the command is ``pod``, and each node ends on its own.

Commands that ``node`` starts belong to the step of the job, so they have its GPUs and end with the job. They survive their
connection, unless they have a time limit. ``node`` listens on an abstract Unix socket whose name ends with random digits:
other users cannot occupy the name, and nothing remains in a file system. Both sides check that the other side belongs to the
same user. A relay (``relay.py``) connects and sends the command with descriptors for its standard input, output and error. The
reply is the command's exit code.

If the parent of this program may be killed without a signal to this program, as a Ray actor may, the command is ``tied``, which
ends with its standard input.
"""

from __future__ import annotations

import array
import errno
import itertools
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from typing import Dict, List, Optional, Set

__all__ = ["RelayConnection", "Resident", "batch", "main", "node", "pod"]

_KEPT = (
    "SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_JOB_ACCOUNT", "SLURM_JOB_END_TIME", "SLURM_JOB_ID", "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_JOB_QOS", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURMD_NODENAME",
)  # fmt: skip
_OF_STEPS = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
"""Prefixes of variables that describe the step. Commands get only ``_KEPT`` of them: MPI and JAX would use the step's ranks."""
_PR_SET_CHILD_SUBREAPER = 36
_LARGEST_REQUEST = 8 * 1024 * 1024
_MOST_PROCESSES = 100_000
"""The maximum number of processes whose children are searched. Without it, fast forks could keep the search from ending."""


class RelayConnection:
    """A relay's connection. The relay sends one command and gets its exit code, or requests the end of the job."""

    def __init__(self, connection: socket.socket) -> None:
        """Use ``connection``."""
        self.socket = connection
        self.pid: Optional[int] = None
        """The command's process."""
        self.end: Optional[int] = None
        """The exit code of the job, if the relay requests the job's end."""
        self.ends_at: Optional[float] = None
        """When the command is killed, in seconds of the monotonic clock."""
        self.is_limited = False
        """Whether the command ends with the connection, and after a time limit."""
        self._data = b""
        self._fds: List[int] = []

    def receive(self) -> bool:
        """Read a part of the request. Returns False if the connection has ended, or the request is too large."""
        size = array.array("i").itemsize * 3
        try:
            data, extra, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(size))
        except BlockingIOError:
            return True
        except OSError:
            return False
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for fd in array.array("i", content[: len(content) - len(content) % 4]):
                    os.set_inheritable(fd, False)
                    self._fds.append(fd)
        self._data += data
        return bool(data) and len(self._data) <= _LARGEST_REQUEST

    def start(self, env: Dict[bytes, bytes]) -> None:
        """Once the request is complete, start its command or note the requested end of the job in ``end``.

        Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a wrong request.
        """
        if self.pid is not None or len(self._data) < 4 or len(self._data) < 4 + struct.unpack(">I", self._data[:4])[0]:
            return
        request = json.loads(self._data[4:].decode("ascii"))
        if "end" in request:
            self.end = int(request["end"]) & 255
            return
        argv = [word.encode("latin-1") for word in request["argv"]]
        if not argv or len(self._fds) != 3:
            raise ValueError("the request must have a command and three descriptors")
        if request["limit_s"] is not None:
            self.is_limited = True
            self.ends_at = time.monotonic() + float(request["limit_s"])
        self.pid = os.fork()
        if self.pid == 0:
            _execute(argv, self._fds, env)
        self._close_fds()

    def answer(self, code: int) -> None:
        """Send the command's exit code."""
        try:
            self.socket.sendall(b"%d\n" % code)
        except OSError:
            return  # the relay has ended

    def kill(self) -> None:
        """Kill the command and its process group."""
        self.ends_at = None
        if self.pid is not None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no process group of its own yet
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection."""
        self._close_fds()
        self.socket.close()

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _execute(argv: List[bytes], fds: List[int], env: Dict[bytes, bytes]) -> None:
    """Become the command, in a session of its own and in the user's home, as after a login."""
    code = 126
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for target, fd in enumerate(fds):
            # The received numbers are above 2, because 0, 1 and 2 are open.
            os.dup2(fd, target, inheritable=True)
        try:
            os.chdir(env.get(b"HOME", b"/"))
        except OSError:
            os.chdir("/")
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        code = 127 if error.errno == errno.ENOENT else 126
        os.write(2, argv[0] + ": {}\n".format(error.strerror).encode())
    finally:
        os._exit(code)


class Resident:
    """The program on one node."""

    def __init__(self, name: str, *, is_tied: bool = False) -> None:
        """Listen for relays at the abstract socket ``name``. With ``is_tied``, end with standard input."""
        _adopt_orphans()  # so that `_reap` reports whether any descendant remains
        self._name = "{}:{}".format(name, os.getpid())
        self._is_tied = is_tied
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind("\0" + name)
        self._server.listen(128)
        self._server.setblocking(False)
        self._connections: Dict[int, RelayConnection] = {}
        self._is_ending = False
        self._is_busy: Optional[bool] = None
        self._env = {
            os.fsencode(name): os.fsencode(value)
            for name, value in os.environ.items()
            if name in _KEPT or not name.startswith(_OF_STEPS)
        }
        self._env.pop(b"SSH_CONNECTION", None)  # it describes the login from which the job was submitted
        if b"DISTFLOW_NODE_ADDRESS" not in self._env:
            self._env[b"DISTFLOW_NODE_ADDRESS"] = _address_to(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")).encode()
        self._wake, wake = socket.socketpair()
        self._wake_writer = wake  # the reference keeps it open
        for end in (self._wake, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def serve(self) -> None:
        """Serve until the job ends or, if tied, until standard input ends."""
        poll = select.poll()
        if self._is_tied:
            poll.register(0, 0)  # `poll` always reports the end of standard input
        poll.register(self._wake, select.POLLIN)
        poll.register(self._server, select.POLLIN)
        while True:
            has_children = self._reap()
            # Slurm sends SIGTERM to all processes of the job, and SIGKILL some time later.
            if self._is_ending and not has_children:
                return
            self._report(is_busy=has_children or bool(self._connections))
            limits = [one.ends_at for one in self._connections.values() if one.ends_at is not None]
            wait_s = min(limits) - time.monotonic() if limits else None
            for fd, _ in poll.poll(None if wait_s is None else max(0, int(wait_s * 1000) + 1)):
                if fd == 0:
                    _kill_children()  # the parent process also does this, but it may have been killed
                    return
                if fd == self._wake.fileno():
                    self._drain_wake()
                elif fd == self._server.fileno():
                    self._accept(poll)
                elif fd in self._connections and not self._receive(self._connections[fd]):
                    self._drop(fd, poll)
            for one in self._connections.values():
                if one.ends_at is not None and one.ends_at <= time.monotonic():
                    one.kill()

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def _drain_wake(self) -> None:
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            return

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if user != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = RelayConnection(connection)
        poll.register(connection, select.POLLIN)

    def _receive(self, one: RelayConnection) -> bool:
        try:
            if not one.receive():
                return False
            one.start(self._env)
            if one.end is not None:
                one.answer(0)
                self._write("end={}".format(one.end))
                return False
        except (ValueError, KeyError, TypeError, OSError):
            return False
        return True

    def _drop(self, fd: int, poll: select.poll) -> None:
        """Forget a connection. Its command continues, unless it has a time limit."""
        one = self._connections.pop(fd)
        poll.unregister(fd)
        if one.is_limited:
            one.kill()
        one.close()

    def _reap(self) -> bool:
        """Reap all ended children, and send their exit codes. Returns whether children remain."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for one in self._connections.values():
                if one.pid == pid:
                    one.pid = one.ends_at = None
                    one.answer(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))

    def _report(self, *, is_busy: bool) -> None:
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._write("busy" if is_busy else "idle")

    def _write(self, word: str) -> None:
        try:
            os.write(1, "{} {}\n".format(self._name, word).encode())
        except OSError:
            return  # the reader has ended, such as `srun`, with which this step ends


def _address_to(other: str) -> str:
    """Return the address from which this node reaches another node of the job; empty if there is no route."""
    if not other:
        return ""
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect((other, 9))  # sends nothing
            return str(one.getsockname()[0])
        except OSError:
            return ""


def _adopt_orphans() -> None:
    """Make this process a child subreaper: the new parent of descendants whose own parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_children() -> None:
    """Kill all descendants: those whose parent was killed become children of this process.

    Children of other users, such as those of ``sudo``, may remain.
    """
    while True:
        killed = 0
        with open("/proc/self/task/{}/children".format(os.getpid()), "rb") as file:
            for pid in file.read().split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                    killed += 1
                except PermissionError:
                    pass
        if not killed:
            return
        os.waitpid(-1, 0)


def _descendants(root: int) -> List[int]:
    """Return the ids of the processes below ``root``, at most about ``_MOST_PROCESSES``."""
    import glob  # takes time at the start of each resident program, and few need it

    found = [root]
    for parent in itertools.islice(found, _MOST_PROCESSES):  # `found` grows in the loop
        for path in glob.glob("/proc/{}/task/*/children".format(parent)):
            try:
                with open(path, "rb") as file:
                    found += map(int, file.read().split())
            except OSError:
                pass  # the thread or process has ended
    return found[1:]


def node(name: str, *, is_tied: bool = False) -> int:
    """Run the resident program in a child process, and kill its descendants when it ends or is killed. Returns the exit code.

    Slurm reliably kills the remaining processes of a step only on clusters that track them by cgroups.
    """
    _adopt_orphans()
    resident = os.fork()
    if resident == 0:
        code = 1
        try:
            Resident(name, is_tied=is_tied).serve()
            code = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the resident program gets them too
    status = os.waitpid(resident, 0)[1]
    _kill_children()
    return 0 if status == 0 else 1


def batch(idle_release_s: float, components: int, source: str, python: List[str]) -> int:
    """Run the resident programs until all are idle for ``idle_release_s``, a relay ends the job, or the job's step ends.

    ``components`` is the number of the job's heterogeneous components. ``python`` is the command line of Python on the nodes,
    which runs ``source``, the text of this file. Returns the exit code of the job.
    """
    job = os.environ.get("SLURM_HET_JOB_ID") or os.environ["SLURM_JOB_ID"]
    groups = ["--het-group=0-{}".format(components - 1)] if components > 1 else []
    options = os.environ.pop("DISTFLOW_STEP_OPTIONS", "").splitlines()
    command = [
        "srun", *groups, *options, "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--input=none",
        "--kill-on-bad-exit=1", *python, "-I", "-S", "-c", source, "node", job,
    ]  # fmt: skip
    step = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert step.stdout is not None
    code = _await_end(step.stdout.fileno(), idle_release_s)
    return step.wait() if code is None else code  # Slurm ends the step with the job


def pod(job: str, host: str, idle_release_s: float) -> int:
    """Run the resident program in a container. Returns the exit code.

    It ends after ``idle_release_s`` without a process or a connection, on SIGTERM, or when a relay ends the allocation.
    """
    reports, out = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(out, 1)
            for fd in (reports, out):
                os.close(fd)
            code = node(_socket_name(job, host))
        finally:
            os._exit(code)
    os.close(out)
    signaled = []

    def forward(number: int, _: object) -> None:
        """Pass the signal on to all processes of the container, or to all descendants if this is not its process 1."""
        signaled.append(number)
        # In a pod with `shareProcessNamespace`, -1 would mean the processes of all containers.
        for pid in [-1] if os.getpid() == 1 else _descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    signal.signal(signal.SIGTERM, forward)
    ended = _await_end(reports, idle_release_s)
    if ended is not None and not signaled:
        return ended  # the end of the container ends all of its processes
    status = os.waitpid(child, 0)[1]
    if signaled:
        return 128 + signaled[0]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _await_end(reports: int, idle_release_s: float) -> Optional[int]:
    """Read the reports of nodes until all are idle for ``idle_release_s``, or a relay ends the allocation.

    Returns the exit code; ``None`` if the reports ended first.
    """
    busy: Set[bytes] = set()
    idle_since = time.monotonic()
    poll = select.poll()
    poll.register(reports, select.POLLIN)
    rest = b""
    while True:
        left_s = None if busy else max(0.0, idle_since + idle_release_s - time.monotonic())
        if not poll.poll(None if left_s is None else int(left_s * 1000) + 1):
            return 0
        data = os.read(reports, 65536)
        if not data:
            return None
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            name, _, word = line.rpartition(b" ")
            was_busy = bool(busy)
            if word == b"busy":
                busy.add(name)
            elif word == b"idle":
                busy.discard(name)
            elif word.startswith(b"end="):
                _discard_messages()
                return int(word[4:])
            if was_busy and not busy:
                idle_since = time.monotonic()


def _discard_messages() -> None:
    """Empty the log file of this job. It is only for failures of this program; the gang has its own logs."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        os.ftruncate(2, 0)


def _socket_name(allocation: str, host: str) -> str:
    """Return a new name for the socket of the resident program of an allocation on a host."""
    return "distflow-{}-{}-{}-{}".format(os.getuid(), allocation, host, os.urandom(8).hex())


def main(argv: List[str]) -> int:
    """Run ``batch IDLE_S COMPONENTS SOURCE PYTHON...``, ``node JOB``, ``tied NAME`` or ``pod ALLOCATION HOST IDLE_S``."""
    if argv[0] == "batch":
        return batch(float(argv[1]), int(argv[2]), argv[3], argv[4:])
    if argv[0] == "tied":
        return node(argv[1], is_tied=True)
    if argv[0] == "pod":
        return pod(argv[1], argv[2], float(argv[3]))
    return node(_socket_name(argv[1], os.environ["SLURMD_NODENAME"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
