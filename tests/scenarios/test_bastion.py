"""The commands for a running task work through a jump host: `exec`, `port-forward`, copies of files."""

from __future__ import annotations

import http.client
import re
import shutil
import signal

import pytest

from distflow.testing.daemons import free_port
from distflow.testing.kernel import Network
from distflow.testing.sshd import make_key
from scenarios.conftest import Cli
from scenarios.lab import Lab

pytestmark = pytest.mark.ssh

SPEC = """
workflow:
  name: inner
  tasks:
  - name: server
    command: [python3, -u, -c, 'import http.server as h; s=h.ThreadingHTTPServer(("127.0.0.1", 0), h.SimpleHTTPRequestHandler);
      print("port", s.server_port); s.serve_forever()']
"""


@pytest.fixture
def bastion_lab(cli: Cli, network: Network, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A pool of one host, which is reachable only through a bastion."""
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    bastion = network.host(tmp_path_factory.mktemp("bastion"), hostname="bastion", alias="bastion", user_key=key)
    gpu1 = network.host(tmp_path_factory.mktemp("gpu1"), hostname="gpu1", alias="gpu1", user_key=key, behind=bastion)
    lab = Lab(cli, {"gpu1": gpu1.sshd})
    lab.ssh_config.write_text(bastion.sshd.client_stanza() + gpu1.sshd.client_stanza(ProxyJump="bastion"))
    return lab


def test_exec_ports_and_files_go_through_a_jump_host(bastion_lab: Lab) -> None:
    cli = bastion_lab.cli
    workflow = cli.submit(cli.spec(SPEC))
    found = re.search(r"port (\d+)", cli.await_log(workflow, "port "))
    assert found is not None

    done = cli.run("workflow", "exec", workflow, "server", "--entry", "sh -c 'hostname; echo \"$DISTFLOW_TASK\"; exit 7'")
    assert (done.code, done.out.splitlines()[1:]) == (7, ["server"]), done.err

    page = "from here"
    (cli.folder / "page.txt").write_text(page)
    if shutil.which("rsync") is not None:
        done = cli.run("workflow", "rsync", "upload", workflow, "page.txt:.")
        assert done.code == 0, done.err
        done = cli.run("workflow", "rsync", "download", workflow, "server", "page.txt:back")
        assert done.code == 0, done.err
        assert (cli.folder / "back" / "page.txt").read_text() == page
    else:
        assert cli.run("workflow", "exec", workflow, "server", "--entry", f"sh -c 'printf \"{page}\" > page.txt'").code == 0

    local_port = free_port()
    process = cli.start("workflow", "port-forward", workflow, "server", "--port", f"{local_port}:{found[1]}")
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"localhost:{local_port} is forwarded to port ")
    connection = http.client.HTTPConnection("127.0.0.1", local_port, timeout=30)
    connection.request("GET", "/page.txt")
    assert connection.getresponse().read().decode() == page
    connection.close()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    bastion_lab.await_no_processes()
