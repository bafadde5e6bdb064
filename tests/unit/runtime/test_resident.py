"""The resident program of an allocation or a pod, when it ends its commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from distflow.runtime.services import relay, resident
from distflow.testing.waiting import wait_until

KILL_CHILDREN = """
import os, subprocess
from distflow.runtime.services import resident

children = [subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
kill = os.kill

def kill_own(pid, number):
    if pid == children[0].pid:
        raise PermissionError
    kill(pid, number)

os.kill = kill_own
resident._kill_children()
os.kill = kill
print(children[0].poll(), os.path.exists("/proc/{}".format(children[1].pid)))
children[0].kill()
"""


def test_the_end_of_the_program_does_not_wait_for_processes_of_other_users() -> None:
    done = subprocess.run([sys.executable, "-c", KILL_CHILDREN], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "None False\n"


COMMAND = 'trap "touch stopped; exit" TERM; touch started; while :; do sleep 0.1; done'


def test_a_signal_to_a_pod_reaches_its_commands_if_its_containers_share_process_ids(tmp_path: Path) -> None:
    # In such a pod, as in this test, the program is not process 1.
    command = [sys.executable, resident.__file__, "pod", tmp_path.name, "n1", "600"]
    start = [sys.executable, relay.__file__, "run", "mark", tmp_path.name, "n1", "-", "sh", "-c", f"cd {tmp_path}; {COMMAND}"]
    with subprocess.Popen(command) as pod, subprocess.Popen(start, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as relayed:
        try:
            wait_until((tmp_path / "started").exists, what="the command runs")
            pod.terminate()
            assert pod.wait(60) == 128 + signal.SIGTERM
            assert (tmp_path / "stopped").exists()
        finally:
            for pid in resident._descendants(pod.pid) if pod.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            pod.kill()
            relayed.kill()
