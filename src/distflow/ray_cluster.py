"""A Ray cluster of a gang: ``python -m distflow.ray_cluster head|worker …``, one on each node.

The head starts Ray, waits until all nodes have joined, and becomes the command, which finds the cluster by ``RAY_ADDRESS``. A
worker starts Ray, and starts it again if Ray ends before ``--timeout`` is over. After that time, the worker ends when Ray ends.
Neither of them calls ``ray stop``, which would end every Ray of the machine: distflow ends the tasks of a gang with all their
processes.

``ray symmetric-run`` (Ray 2.60) cannot replace this program: it ends with ``ray stop``, it refuses a node on which another Ray
runs, it does not take ``--node-ip-address`` (the address on the training network), and it exits with 0 if a node cannot join.

Exit codes: the command's; that of ``ray start`` if the head does not start, or if a worker ends because Ray ended (then 1
instead of 0); 1 if not all nodes joined in time; 2 for wrong arguments; 126 if Ray or the command cannot be executed; 127 if it
does not exist.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["Clock", "main"]

_POLL_S = 1.0
_AWAIT = f"""\
import ray, sys, time
wanted, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
while (alive := sum(node["Alive"] for node in ray.nodes())) < wanted and time.monotonic() < until:
    time.sleep({_POLL_S})
print("nodes", alive)
"""
"""Runs in a separate process, so that the command starts without an open connection to Ray."""

Clock = Callable[[], float]


def main(argv: Sequence[str] | None = None, *, clock: Clock = time.monotonic) -> int:
    """Run the head or a worker, and return the exit code. If all nodes join, the head becomes the command instead."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args, command = _parser().parse_args(words[:at]), words[at + 1 :]
    if (args.part == "head") != bool(command):
        _parser().error("`head` needs a command after `--`, and `worker` takes none")
    deadline = clock() + args.timeout
    try:
        if args.part == "worker":
            return _worker(args, deadline, clock)
        code = _head(args, deadline, clock)
        if code == 0:
            os.execvp(command[0], command)  # noqa: S606  the command takes this process's place
        return code
    except OSError as error:  # an error of `os.execvp` has no file name
        is_missing = isinstance(error, FileNotFoundError)
        hint = "; install Ray on every node (pip install ray)" if error.filename == "ray" and is_missing else ""
        _say(f"{error.filename or (command or ['ray'])[0]}: {'not found' if is_missing else error.strerror}{hint}")
        return 127 if is_missing else 126


def _head(args: argparse.Namespace, deadline: float, clock: Clock) -> int:
    """Start the head, wait for all nodes, and return 0 when they have joined; otherwise an exit code."""
    _, _, port = args.address.rpartition(":")
    started = subprocess.run([*_start(args), "--head", "--port", port, "--include-dashboard=false"], check=False)
    if started.returncode != 0:
        return started.returncode
    while True:
        joined, trouble = _await_nodes(args.nodes, deadline - clock())
        if joined >= args.nodes:
            break
        if clock() > deadline:
            hint = "the logs of the other tasks show why" if joined else f"Ray on this node does not answer: {trouble}"
            _say(f"only {joined} of {args.nodes} nodes have joined Ray after {args.timeout:g} s; {hint}")
            return 1
        if joined == 0:
            _pause()
    _say(f"all {args.nodes} nodes have joined Ray at {args.address}")
    return 0


def _worker(args: argparse.Namespace, deadline: float, clock: Clock) -> int:
    while True:
        # With --block, `ray start` ends when Ray ends, or when the head does not answer.
        ended = subprocess.run([*_start(args), "--address", args.address, "--block"], check=False)
        if clock() > deadline:
            _say(f"`ray start` for {args.address} ended with exit code {ended.returncode}; its output above shows the cause")
            return ended.returncode or 1
        _pause()


def _start(args: argparse.Namespace) -> list[str]:
    words = ["ray", "start", "--node-ip-address", args.node_address, "--disable-usage-stats"]
    words += ["--num-gpus", str(args.gpus)] if args.gpus is not None else []
    return words + (["--num-cpus", str(args.cpus)] if args.cpus is not None else [])


def _await_nodes(wanted: int, seconds: float) -> tuple[int, str]:
    """Wait until ``wanted`` nodes are alive, at most ``seconds``. Return the number of live nodes.

    If Ray does not answer, the number is 0, and the last line of the error is returned, too.
    """
    result = subprocess.run(
        [sys.executable, "-c", _AWAIT, str(wanted), str(seconds)], capture_output=True, text=True, check=False
    )  # fmt: skip
    for line in result.stdout.splitlines():
        word, _, number = line.partition(" ")
        if word == "nodes":
            return int(number), ""
    return 0, (result.stderr.strip().splitlines() or ["no error message"])[-1]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _pause() -> None:
    threading.Event().wait(_POLL_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distflow.ray_cluster", description="One node of a gang's Ray cluster.")
    parser.add_argument("part", choices=["head", "worker"])
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="address of the head")
    parser.add_argument("--node-address", required=True, help="address of this node on the training network")
    parser.add_argument("--gpus", type=int, help="number of GPUs that Ray may use on this node (default: all that it sees)")
    parser.add_argument("--cpus", type=int, help="number of CPUs that Ray may use on this node (default: all)")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes that the head waits for, including its own")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="maximum time until all nodes have joined")
    return parser


if __name__ == "__main__":
    sys.exit(main())
