from __future__ import annotations

import subprocess
import sys

KILL = """
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


def test_the_end_does_not_wait_for_processes_of_other_users() -> None:
    done = subprocess.run([sys.executable, "-c", KILL], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "None False\n"
