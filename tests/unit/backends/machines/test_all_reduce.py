"""The all-reduce of ``pool check``, with local processes instead of nodes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

from distflow.backends.machines.checks import network
from distflow.backends.machines.checks.measured import NodeMeasurements, Torch
from distflow.pools.model import Node


class _Link:
    """The link to a node whose ``setup`` prints a text without a line feed."""

    def request(self, _op: str, *, argv: list[str], **_: object) -> dict[str, Any]:
        if "init_process_group" in argv[2]:
            return {"exit_code": 0, "stdout": "\n@@distflow-all-reduce [[1024, 0.5]]\n", "stderr": ""}
        done = subprocess.run([sys.executable, *argv[1:]], capture_output=True, text=True, check=True)
        return {"exit_code": 0, "stdout": f"loaded modules {done.stdout}", "stderr": ""}

    def close(self) -> None:
        pass


def test_the_output_of_setup_does_not_hide_the_port() -> None:
    both = [Node(name=name, host=name, root="/r", python="python3") for name in ("gpu1", "gpu2")]
    nodes = [NodeMeasurements(node=one, address="127.0.0.1", torch=Torch(version="2.6.0")) for one in both]
    found = network.all_reduce([(one, cast("Any", _Link())) for one in nodes])
    assert (found.failed, found.times) == (None, ((1024, 0.5),))
