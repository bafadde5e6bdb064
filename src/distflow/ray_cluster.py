"""A Ray cluster of a gang: ``python -m distflow.ray_cluster head|worker …``, one on each node.

The head starts Ray, waits until all nodes have joined, and becomes the command, which finds the cluster by ``RAY_ADDRESS``. A
worker tries to join until the head answers, and stays as long as Ray does. Neither stops anything: the tasks of a gang are
ended by distflow, with all their processes, and ``ray stop`` would end every Ray of the machine.

``ray symmetric-run`` (Ray 2.60) cannot replace this program: it ends with ``ray stop``, it refuses a node on which another Ray
runs, it does not take ``--node-ip-address`` (the address on the training network), and it exits with 0 if a node cannot join.

Exit codes: the command's; 1 when the nodes did not come together in time; 127 when Ray or the command is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["Clock", "main"]

_EVERY_S = 1.0
_COUNT = (
    "import json, ray; ray.init(address='auto', logging_level='ERROR', log_to_driver=False); "
    "print('nodes', json.dumps(sum(node['Alive'] for node in ray.nodes())))"
)
"""Runs in a separate process, so that the command starts without an open connection to Ray."""

Clock = Callable[[], float]


def main(argv: Sequence[str] | None = None, *, clock: Clock = time.monotonic) -> int:
    """Do one node's part; return the exit code. The head's becomes the command and does not return when all went well."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args, command = _parser().parse_args(words[:at]), words[at + 1 :]
    if (args.part == "head") != bool(command):
        _parser().error("the head is given a command after --, a worker none")
    deadline = clock() + args.timeout
    try:
        if args.part == "worker":
            return _worker(args, deadline, clock)
        code = _head(args, deadline, clock)
        if code == 0:
            os.execvp(command[0], command)  # noqa: S606  the command takes this process's place
        return code
    except FileNotFoundError as error:
        hint = "; install Ray on every node (pip install ray)" if error.filename == "ray" else ""
        _say(f"{error.filename}: not found{hint}")
        return 127


def _head(args: argparse.Namespace, deadline: float, clock: Clock) -> int:
    """Start the head and wait for all nodes; return 0 when they are there."""
    _, _, port = args.address.rpartition(":")
    started = subprocess.run([*_start(args), "--head", "--port", port, "--include-dashboard=false"], check=False)
    if started.returncode != 0:
        return started.returncode
    there = 0
    while there < args.nodes:
        if clock() > deadline:
            _say(f"only {there} of {args.nodes} nodes have joined Ray after {args.timeout:g} s")
            return 1
        there = _nodes()
        if there < args.nodes:
            _pause()
    _say(f"all {args.nodes} nodes have joined Ray at {args.address}")
    return 0


def _worker(args: argparse.Namespace, deadline: float, clock: Clock) -> int:
    while True:
        # With --block it ends only when Ray does; before that it ends because the head does not answer yet.
        ended = subprocess.run([*_start(args), "--address", args.address, "--block"], check=False)
        if clock() > deadline:
            _say(f"Ray of this node has ended with {ended.returncode}")
            return ended.returncode or 1
        _pause()


def _start(args: argparse.Namespace) -> list[str]:
    words = ["ray", "start", "--node-ip-address", args.node_address, "--disable-usage-stats"]
    words += ["--num-gpus", str(args.gpus)] if args.gpus is not None else []
    return words + (["--num-cpus", str(args.cpus)] if args.cpus is not None else [])


def _nodes() -> int:
    """Return how many nodes are alive; 0 while Ray cannot say."""
    asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    for line in asked.stdout.splitlines():
        word, _, number = line.partition(" ")
        if word == "nodes":
            return int(json.loads(number))
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _pause() -> None:
    threading.Event().wait(_EVERY_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distflow.ray_cluster", description="One node of a gang's Ray cluster.")
    parser.add_argument("part", choices=["head", "worker"])
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="of the head")
    parser.add_argument("--node-address", required=True, help="of this node on the training network")
    parser.add_argument("--gpus", type=int, help="that Ray may use here (default: all that it sees)")
    parser.add_argument("--cpus", type=int, help="that Ray may use here (default: all)")
    parser.add_argument("--nodes", type=int, default=1, help="how many the head waits for")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="until all nodes must have joined")
    return parser


if __name__ == "__main__":
    sys.exit(main())
