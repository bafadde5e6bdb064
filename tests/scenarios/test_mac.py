"""A submitter without Linux-only names of the standard library and without /proc. The nodes are Linux machines over SSH.

This does not replace a test on a Mac. It shows that the submitter's code needs no Linux features.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scenarios.conftest import Done
from scenarios.lab import GANG, Lab

SITE = '''
import os, select, signal, socket, sys, time

LINUX = {
    os: """copy_file_range eventfd memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity
        sendfile setns setresgid setresuid splice unshare waitid O_PATH O_TMPFILE""",
    select: "EPOLLIN epoll",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT AF_NETLINK AF_VSOCK",
    time: "CLOCK_BOOTTIME CLOCK_MONOTONIC_RAW",
}
for module, names in LINUX.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def hide(event, args):
    if event in ("open", "os.listdir", "os.scandir", "socket.bind", "socket.sendto", "socket.connect"):
        path = os.fsdecode(args[-1] if event.startswith("socket") and isinstance(args[-1], (str, bytes)) else args[0]
            if isinstance(args[0], (str, bytes)) else "")
        if path.startswith(("/proc", "/sys/")) or path.startswith("\\0"):
            raise FileNotFoundError(2, "No such file or directory", path)


sys.addaudithook(hide)
'''


@pytest.mark.ssh
def test_a_submitter_needs_no_linux_features(lab: Lab, tmp_path: Path) -> None:
    site = tmp_path / "mac"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    environment = lab.cli.environment | {"PYTHONPATH": str(site)}

    def run(*arguments: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "distflow", *arguments], env=environment, cwd=lab.cli.folder, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    check = subprocess.run(
        [sys.executable, "-c", "import os; print(hasattr(os, 'pidfd_open')); open('/proc/stat')"], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert check.stdout == "False\n", check.stderr
    assert "FileNotFoundError" in check.stderr

    spec = lab.cli.spec(GANG.replace("GO", str(tmp_path / "go")))
    done = run("workflow", "submit", spec)
    assert done.code == 0, done.err
    lab.cli.await_log("gang-1", "offset 4")
    assert "RUNNING" in run("workflow", "query", "gang-1").out
    done = run("workflow", "exec", "gang-1", "master", "--entry", "echo from the node")
    assert (done.code, done.out) == (0, "from the node\n"), done.err
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print()\n")
    done = run("workflow", "rsync", "upload", "gang-1", "master", f"{tmp_path / 'code'}:code", "--daemon")
    assert done.code == 0, done.err
    assert "RUNNING" in run("workflow", "rsync", "status").out.upper()
    done = run("workflow", "rsync", "stop", "gang-1")
    assert done.code == 0, done.err
    done = run("workflow", "cancel", "gang-1", "--wait", "60")
    assert done.code == 0, done.err
    assert "FAILED_CANCELED" in run("workflow", "query", "gang-1").out
