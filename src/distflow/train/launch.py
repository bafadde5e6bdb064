"""Start the ranks of one machine: ``python -m distflow.train.launch --offset 8 --size 8 --world_size 16 train.py …``.

Every machine of a world runs this, with its own offset. Under distflow the flags can be left out: a task's variables say
the same. Outside of distflow, several machines also need --master-addr and --master-port.

The exit code is that of the rank that failed first (128 + the signal's number when a signal ended it). If no rank failed, it
is 0 if all ranks exited with 0. Otherwise, the ranks were stopped, and it is 143 (Ctrl-C: 130, SIGHUP: 129, SIGQUIT: 131).
Wrong arguments: 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from distflow.train.launcher.starting import LaunchOptions, LayoutError, read_settings, run_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks that the command line describes; return the exit code. Raises ``SystemExit`` (2) when it is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.module and not Path(args.target).is_file():
        parser.error(f"{args.target}: no such script; give the path of a Python file, or -m and the name of a module")
    try:
        settings = read_settings(
            os.environ, **{name: value for name, value in vars(args).items() if name in LaunchOptions.__annotations__}
        )
    except LayoutError as error:
        parser.error(str(error))
    return run_command(settings, "module" if args.module else "script", args.target, args.arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distflow.train.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--offset", type=int, help="first global rank of this machine (default: DISTFLOW_RANK_OFFSET, else 0)")
    add("--size", type=int, help="number of ranks on this machine (default: DISTFLOW_RANK_SIZE, else 1)")
    add("--world_size", "--world-size", type=int, help="ranks on all machines (default: DISTFLOW_WORLD_SIZE, else offset+size)")
    add(
        "--master-addr", "--master_addr",
        help="address of the machine with rank 0 (default: MASTER_ADDR, else this machine if it has all ranks)",
    )  # fmt: skip
    add(
        "--master-port", "--master_port", type=int,
        help="port of rank 0's store (default: MASTER_PORT, else a free one if this machine has all ranks)",
    )  # fmt: skip
    add("--max-restarts", "--max_restarts", type=int, help="restarts of all ranks after failures (one machine only)")
    add("--stop-grace", dest="stop_grace_s", type=float, metavar="S", help="seconds from SIGTERM to SIGKILL (default: 30)")
    add("--failure-grace", dest="failure_grace_s", type=float, metavar="S", help="the same, after a rank failed (default: 3)")
    add("--numa", action="store_true", help="bind each rank to the CPUs of its GPU's NUMA node, if the machine reports it")
    add("-m", "--module", action="store_true", default=False, help="the target is the name of a module, as in python -m")
    parser.add_argument("target", help="script, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
