"""Nodes on which the runtime cannot start: the error names the cause and the remedy.

Each node is a real sshd in its own mount namespace, with the file systems and the /etc/passwd of such a node.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.backends.machines.connection.bootstrap import connect
from distflow.errors import AuthenticationRefused, BootstrapFailed, NodeUnreachable
from distflow.runtime.files.root_directory import PRIVATE
from distflow.testing.sshd import Sshd
from integration.ssh.conftest import MakeServer, Reach

pytestmark = pytest.mark.ssh

PYTHON = "/usr/bin/python3"
ROOT = "/mnt/distflow"
NODE = f"{ROOT}/{PRIVATE}"
MakeNode = Callable[..., Sshd]


@pytest.fixture
def make_node(make_server: MakeServer, tmp_path: Path) -> MakeNode:
    """Start a node. ``setup`` runs before its sshd. Tests log in as ``user``, whose line of /etc/passwd is ``passwd``."""
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces are not available")
    if not Path(PYTHON).exists():
        pytest.skip(f"{PYTHON} is missing, which all users can run")

    def make(setup: str = "true", *, user: str = "root", passwd: str = "") -> Sshd:
        entries = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(f"{user}:")]
        (tmp_path / "passwd").write_text("\n".join([passwd, *entries]) + "\n")
        mounts = f"mount --bind {tmp_path / 'passwd'} /etc/passwd && " if passwd else ""
        # Other users cannot read the directories of tests, so root prints the keys for sshd.
        keys = {"AuthorizedKeysFile": "none", "AuthorizedKeysCommandUser": "root"}
        keys["AuthorizedKeysCommand"] = f"/bin/cat {tmp_path / 'sshd-gpu9' / 'authorized_keys'}"
        # This replaces the option that sets HOME: the home directory is that of /etc/passwd.
        options = {**keys, "SetEnv": "DISTFLOW_TEST=1"}
        prefix = ["unshare", "--mount", "sh", "-c", f'{mounts}{{ {setup}; }} && exec "$@"', "sh"]
        server = make_server(prefix=prefix, options=options)
        server.user = user
        server.client_config.write_text(server.client_stanza(User=user))
        return server

    return make


def failure(reach: Reach, server: Sshd, *, root: str = ROOT, python: str = PYTHON) -> BootstrapFailed:
    with pytest.raises(BootstrapFailed) as caught:
        connect(reach(server), root, python, timeout_s=60).close()
    return caught.value


def test_a_full_disk_is_reported(make_node: MakeNode, reach: Reach) -> None:
    server = make_node("mount -t tmpfs -o size=64k none /mnt")
    error = failure(reach, server)
    assert error.detail == f"distflow's runtime has no room in {NODE}: its disk is full"
    assert "`root:`" in error.hint
    # No incomplete files remain, or each try would use more space.
    remaining = reach(server).run(["find", f"{NODE}/runtime", "-mindepth", "1"], timeout_s=60)
    assert remaining.stdout == b""


def test_a_read_only_file_system_is_reported(make_node: MakeNode, reach: Reach) -> None:
    error = failure(reach, make_node("mount -t tmpfs -o ro none /mnt"))
    assert error.detail == f"distflow's directory {ROOT} is on a read-only file system"


def test_a_root_directory_of_another_user_is_reported(make_node: MakeNode, reach: Reach) -> None:
    setup = f"mount -t tmpfs none /mnt && mkdir -p {ROOT}"
    error = failure(reach, make_node(setup, user="ada", passwd="ada:x:12345:12345::/mnt:/bin/sh"))
    assert error.detail == f"distflow's directory {NODE} cannot be used by ada: {ROOT} belongs to root (mode 755)"
    assert "set `root:` of the node or its pool to another directory" in error.hint


def test_a_runtime_directory_of_another_user_is_refused(make_node: MakeNode, reach: Reach) -> None:
    setup = f"mount -t tmpfs none /mnt && mkdir -p -m 777 {NODE}/runtime && chmod 1777 {ROOT}"
    error = failure(reach, make_node(setup, user="ada", passwd="ada:x:12345:12345::/mnt:/bin/sh"))
    assert error.detail == f"{NODE} belongs to root (mode 755), who could replace ada's programs there"
    assert "chown -R ada" in error.hint


def test_a_directory_without_write_permission_is_reported(make_node: MakeNode, reach: Reach) -> None:
    setup = "mount -t tmpfs none /mnt && chown 12345 /mnt && chmod 500 /mnt"
    error = failure(reach, make_node(setup, user="ada", passwd="ada:x:12345:12345::/mnt:/bin/sh"))
    assert error.detail == f"distflow's directory {ROOT} cannot be used by ada: /mnt is not writable (mode 500)"


def test_a_missing_home_directory_is_reported(make_node: MakeNode, reach: Reach) -> None:
    server = make_node(user="ada", passwd="ada:x:12345:12345::/no/such/home:/bin/sh")
    error = failure(reach, server, root="~/.distflow")
    assert error.detail == "ada has no home directory on this node: /no/such/home does not exist"
    assert "`root:`" in error.hint


def test_a_file_in_place_of_the_root_directory_is_reported(make_node: MakeNode, reach: Reach) -> None:
    error = failure(reach, make_node(f"mount -t tmpfs none /mnt && echo > {ROOT}"))
    assert error.detail == f"{ROOT} is not a directory, but distflow needs one there"


def test_a_missing_python_is_reported(make_server: MakeServer, reach: Reach) -> None:
    error = failure(reach, make_server(), python="python3.99")
    assert error.detail.startswith("`python3.99` is not on this node, or not in the PATH of a login")
    assert "`--python`, `python=` of the hostfile, or `python:` of the node or its pool.\nThe node printed:\n" in error.hint


def test_a_python_that_is_not_executable_is_reported(make_server: MakeServer, reach: Reach, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    assert failure(reach, make_server(), python=str(tmp_path / "python")).detail.endswith("cannot be executed on this node")


def test_an_old_python_is_reported(make_server: MakeServer, reach: Reach, tmp_path: Path) -> None:
    # This interpreter runs the version check of the stub with the version of an old Python.
    old = tmp_path / "old"
    old.write_text(
        f"#!/bin/sh\nshift 3; code=$1; shift; exec {PYTHON} -I -S -c \"import sys; sys.version = '3.6.9 (default)'; "
        'sys.version_info = (3, 6, 9)\n$code" "$@"\n'
    )
    old.chmod(0o755)
    assert failure(reach, make_server(), python=str(old)).detail == f"Python 3.8 or newer is needed; {PYTHON} is 3.6.9"


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false"])
def test_a_login_shell_that_does_not_run_commands_is_reported(make_node: MakeNode, reach: Reach, shell: str) -> None:
    if not Path(shell).exists():
        pytest.skip(f"{shell} is not installed")
    error = failure(reach, make_node(user="ada", passwd=f"ada:x:12345:12345::/tmp:{shell}"))
    assert error.detail == f"the connection ended with exit code 1 before `{PYTHON}` answered"
    assert "nologin" in error.hint
    if shell.endswith("nologin"):
        assert "This account is currently not available" in error.hint


def test_the_output_of_a_login_shell_that_exits_is_shown(make_node: MakeNode, reach: Reach, tmp_path: Path) -> None:
    error = failure(reach, make_node(passwd=f"root:x:0:0::/root:{_menu(tmp_path)}"))
    assert error.detail == f"the connection ended with exit code 0 before `{PYTHON}` answered"
    assert "Maintenance until Monday" in error.hint


def test_a_login_shell_that_does_not_exist_refuses_the_login(make_node: MakeNode, reach: Reach) -> None:
    server = make_node(user="ada", passwd="ada:x:12345:12345::/tmp:/no/such/shell")
    with pytest.raises(AuthenticationRefused):
        connect(reach(server), ROOT, PYTHON, timeout_s=60)


def test_a_broken_connection_makes_the_node_unreachable(make_server: MakeServer, reach: Reach) -> None:
    server = make_server()
    # This kills sshd before the command can answer.
    killer = server.directory / "killer"
    killer.write_text("#!/bin/sh\nkill -9 $PPID\nexec sleep 60\n")
    killer.chmod(0o755)
    server._options["ForceCommand"] = f"exec {killer}"
    server.restart()
    with pytest.raises(NodeUnreachable, match="the connection broke before distflow's process answered"):
        connect(reach(server), ROOT, PYTHON, timeout_s=60)


def test_the_runtime_works_on_a_noexec_file_system(make_node: MakeNode, reach: Reach) -> None:
    server = make_node("mount -t tmpfs -o noexec none /mnt")
    link = connect(reach(server), ROOT, PYTHON, timeout_s=60)
    try:
        assert link.request("hello", watch=[])["facts"]["root"] == NODE
    finally:
        link.close()


def _menu(folder: Path) -> Path:
    menu = folder / "menu"
    menu.write_text("#!/bin/sh\necho Maintenance until Monday\nexit 0\n")
    menu.chmod(0o755)
    return menu
