"""Tasks that look up ``{{host:<task>}}`` get an answer, whatever DNS knows of the address."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from distflow.plan.nametools import name_tools

REAL = ("nslookup", "dig", "host")
ADDRESSES = {"@@ADDRESS:master@@": "192.0.2.7", "@@ADDRESS:worker@@": "2001:db8::7"}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """The scripts for both tasks, as a task finds them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for file in name_tools(["nslookup getent dig host", *ADDRESSES]):
        text = file.text or ""
        for placeholder, address in ADDRESSES.items():
            text = text.replace(placeholder, address)
        path = tmp_path / file.path
        path.write_text(text)
        path.chmod(file.mode)
    return folder


def run(tools: Path, script: str, path: str = os.environ["PATH"]) -> str:
    """Run a script of a task with the tools first in its PATH; its output and exit code."""
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": f"{tools}:{path}"}, capture_output=True, text=True, timeout=30, check=False
    )
    return f"{done.stdout}{done.stderr}({done.returncode})"


@pytest.mark.parametrize(
    "script",
    [
        # The forms that OSMO's pages and specs teach.
        r'nslookup HOST | grep -oP "\\d+.\\d+.\\d+.\\d+" | tail -n 1',
        "nslookup HOST | grep Address | tail -1 | awk '{print $2}'",
        "nslookup HOST | awk '/^Address: / { print $2 }'",
        "nslookup -type=A HOST | sed -n 's/^Address: //p'",
        "nslookup HOST | grep -A1 Name: | tail -n 1 | cut -d' ' -f2",
        "getent hosts HOST | awk '{ print $1 }'",
        "getent ahostsv4 HOST | head -n 1 | awk '{ print $1 }'",
        "dig +short HOST",
        "dig HOST A +short | head -n1",
        "dig HOST | grep -A1 'ANSWER SECTION' | tail -n 1 | awk '{print $5}'",
        "host HOST | awk '{print $NF}'",
        "host -t A HOST | grep 'has address' | cut -d' ' -f4",
    ],
)
def test_every_usual_lookup_gives_the_address(tools: Path, script: str) -> None:
    assert run(tools, script.replace("HOST", "192.0.2.7")) == "192.0.2.7\n(0)"


@pytest.mark.parametrize(
    "script", ["nslookup HOST | sed -n 's/^Address: //p'", "dig +short HOST", "host HOST | awk '{print $NF}'"]
)
def test_an_address_of_ipv6_is_found_too(tools: Path, script: str) -> None:
    assert run(tools, script.replace("HOST", "2001:db8::7")) == "2001:db8::7\n(0)"


@pytest.mark.parametrize(
    "command",
    [
        "nslookup example.org",
        "nslookup example.org 192.0.2.7",  # here the address is the server to ask
        "nslookup -type=PTR 192.0.2.7",
        "dig +short 192.0.2.70",
        "dig -x 192.0.2.7",
        "host -t PTR 192.0.2.7",
        "getent passwd 192.0.2.7",
        "getent hosts *",
    ],
)
def test_everything_else_goes_to_the_real_program(tools: Path, tmp_path: Path, command: str) -> None:
    real = tmp_path / "real"
    real.mkdir()
    program, _, words = command.partition(" ")
    (real / program).write_text('#!/bin/sh\necho "real: $*"; exit 3\n')
    (real / program).chmod(0o700)
    assert run(tools, f"set -f; {command}", f"{real}:{os.environ['PATH']}") == f"real: {words}\n(3)"


def test_a_program_that_the_node_does_not_have_says_so(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [str(tools / "nslookup"), "example.org"], env={"PATH": f"{tools}:{tmp_path / 'empty'}"}, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("nslookup: not found on this node")


@pytest.mark.parametrize("program", REAL)
def test_the_answer_has_the_form_of_the_real_program(tools: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} not found: apt-get install bind9-dnsutils")
    # The real program is only asked for its version: nothing leaves this machine.
    version = {"nslookup": "-version", "dig": "-v", "host": "-V"}[program]
    assert run(tools, f"{program} {version}") == run(tools, f"{shutil.which(program)} {version}")


@pytest.mark.parametrize(
    "texts",
    [
        ["nslookup example.org"],
        ["python3 train.py --host @@ADDRESS:master@@"],
        ["curl http://@@ADDRESS:master@@:80/ --header 'host: x' /usr/bin/host my.host host.txt host=1"],
    ],
)
def test_who_looks_up_no_task_gets_no_tools(texts: list[str]) -> None:
    assert name_tools(texts) == ()
