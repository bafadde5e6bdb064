"""Ports of a task's node, from here."""

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


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    words = process.communicate(timeout=30)[1]
    return process.returncode, words


def test_connections_at_once_reach_the_task_until_ctrl_c_or_its_end(place: Cli) -> None:
    workflow = place.submit(place.spec(SPEC))
    log = place.await_log(workflow, "port ")
    found = re.search(r"port (\d+)", log)
    assert found is not None
    theirs, ours, dead, unused = int(found[1]), free_port(), free_port(), free_port()
    process = place.start("workflow", "port-forward", workflow, "server", "--port", f"{ours}:{theirs},{dead}:{unused}")
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"localhost:{ours} is forwarded to port {theirs} of ")
    assert process.stderr.readline().startswith(f"localhost:{dead} is forwarded to port {unused} of ")
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(_get(ours))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["from the task"] * 12
    # Where nothing listens, the visitor is turned away, and it is said.
    with pytest.raises((http.client.HTTPException, OSError)):
        _get(dead)
    assert f"nothing answers on its port {unused}" in process.stderr.readline()
    taken = place.run("workflow", "port-forward", workflow, "server", "--port", f"{ours}:{theirs}")
    assert (taken.code, f"cannot listen on port {ours} of localhost" in taken.err) == (2, True)
    process.send_signal(signal.SIGINT)
    assert _end(process)[0] == 130
    process = place.start("workflow", "port-forward", workflow, "server", "--port", f"{ours}:{theirs}")
    wait_until(lambda: _is_open(ours), 30)
    assert place.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    code, words = _end(process)
    assert (code, "server has ended: FAILED_CANCELED" in words) == (1, True)


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ("a", "`a` is not a port"),
        ("0", "`0` is not a port"),
        ("70000", "`70000` is not a port"),
        ("9-9", "the range 9-9 does not end with a larger port"),
        ("1-2:3", "differ in length: 2 and 1"),
        ("80:1,80:2", "names a local port twice"),
        ("1000-1099", "at most 30"),
    ],
)
def test_ports_that_mean_nothing_are_errors(cli: Cli, ports: str, words: str) -> None:
    done = cli.run("workflow", "port-forward", "x-1", "t", "--port", ports)
    assert (done.code, words in done.err) == (2, True), done.err
