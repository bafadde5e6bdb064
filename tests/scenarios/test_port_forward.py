"""`workflow port-forward`: ports of this machine are forwarded to ports of a task's node."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import subprocess
import threading

import pytest

from distflow.testing.daemons import free_port
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

SPEC = """
workflow:
  name: web
  tasks:
  - name: server
    command: [python3, -u, -c, 'import http.server as h; s=h.ThreadingHTTPServer(("127.0.0.1", 0), h.SimpleHTTPRequestHandler);
      print("port", s.server_port); s.serve_forever()']
    files:
    - {path: page.txt, contents: "from the task"}
"""


def _get(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/page.txt")
    return connection.getresponse().read().decode()


def _wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    stderr = process.communicate(timeout=30)[1]
    return process.returncode, stderr


def test_parallel_connections_reach_the_task_until_ctrl_c_or_its_end(any_cli: Cli) -> None:
    workflow = any_cli.submit(any_cli.spec(SPEC))
    log = any_cli.await_log(workflow, "port ")
    found = re.search(r"port (\d+)", log)
    assert found is not None
    remote_port, local_port, other_port, closed_port = int(found[1]), free_port(), free_port(), free_port()
    process = any_cli.start(
        "workflow", "port-forward", workflow, "server", "--port", f"{local_port}:{remote_port},{other_port}:{closed_port}"
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"localhost:{local_port} is forwarded to port {remote_port} of ")
    assert process.stderr.readline().startswith(f"localhost:{other_port} is forwarded to port {closed_port} of ")
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(_get(local_port))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["from the task"] * 12
    # If nothing listens on the task's port, the connection is closed, and the failure is reported.
    with pytest.raises((http.client.HTTPException, OSError)):
        _get(other_port)
    assert f"nothing answers on its port {closed_port}" in process.stderr.readline()
    taken = any_cli.run("workflow", "port-forward", workflow, "server", "--port", f"{local_port}:{remote_port}")
    assert (taken.code, f"cannot listen on port {local_port} of localhost" in taken.err) == (2, True)
    process.send_signal(signal.SIGINT)
    assert _wait_for_end(process)[0] == 130
    process = any_cli.start("workflow", "port-forward", workflow, "server", "--port", f"{local_port}:{remote_port}")
    wait_until(lambda: _is_open(local_port), 30)
    assert any_cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    code, stderr = _wait_for_end(process)
    assert (code, "server has ended: FAILED_CANCELED" in stderr) == (1, True)


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ("a", "`a` is not a port"),
        ("0", "`0` is not a port"),
        ("70000", "`70000` is not a port"),
        ("9-9", "the last port of the range `9-9` is not larger than its first port"),
        ("1-2:3", "differ in length: 2 and 1"),
        ("80:1,80:2", "names a local port twice"),
        ("1000-1099", "at most 30"),
    ],
)
def test_invalid_ports_are_refused(cli: Cli, ports: str, message: str) -> None:
    done = cli.run("workflow", "port-forward", "x-1", "t", "--port", ports)
    assert (done.code, message in done.err) == (2, True), done.err
