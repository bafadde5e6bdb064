"""The program of a rank that calls a function of ``distflow.run``. It is sent to the nodes, and imports nothing of distflow.

Its directory contains ``function.pkl``, the function with its arguments, and ``cloudpickle``, in the version that wrote it. The
result is a file of the task's output. It is a pickle of one of these mappings:

* ``{"value": bytes}``, the pickled return value
* ``{"error": bytes, "traceback": str, "name": str, "at": float}``, the pickled exception, which is empty if it has no pickle,
  its traceback, its type and message, and the time in seconds since the epoch
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["RESULTS", "main", "result_name"]

RESULTS = "distflow-results"
"""The directory of the results in the output of each task."""
__tracebackhide__ = True
"""The launcher leaves the frames of this module out of tracebacks, because they say nothing to users."""
_HERE = Path(__file__).resolve().parent


def result_name(rank: int) -> str:
    """Return the name of the file with the result of a rank."""
    return f"rank-{rank}.pkl"


def main() -> None:
    """Call the function and store its result. An exception ends the process, after it has been stored."""
    about = json.loads((_HERE / "function.json").read_text(encoding="utf-8"))
    _check_python(about["python"], about["executable"])
    sys.path[1:1] = [os.getcwd(), *(os.path.join(os.getcwd(), path) for path in about["paths"])]
    import cloudpickle  # noqa: PLC0415  it is next to this file on a node

    try:
        function, args, kwargs = pickle.loads((_HERE / "function.pkl").read_bytes())
    except Exception as error:
        _refuse(f"the function cannot be loaded with {sys.executable}: {type(error).__name__}: {error}")
    try:
        value = {"value": cloudpickle.dumps(function(*args, **kwargs))}
    except Exception as error:
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
        name = traceback.format_exception_only(type(error), error)[-1].strip()
        _store({"error": _pickled(cloudpickle, error), "traceback": shown, "name": name, "at": time.time()})  # noqa: TID251
        raise
    _store(value)


def _check_python(wanted: str, executable: str) -> None:
    """End the process if this is another Python than the one that wrote the function: their byte code differs."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != wanted:
        _refuse(
            f"the function was written by Python {wanted} ({executable}), and {sys.executable} is Python {version}. "
            f"Use the same version: give distflow.run the path of a Python {wanted} of the nodes as `python=`"
        )


def _refuse(message: str) -> NoReturn:
    _store({"error": b"", "traceback": "", "name": message, "at": time.time()})  # noqa: TID251  no clock exists here
    raise SystemExit(f"distflow: error: {message}")


def _pickled(cloudpickle: Any, error: Exception) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # some exceptions have pickles that cannot be read
    except Exception:
        return b""
    return data


def _store(result: dict[str, Any]) -> None:
    """Write the result as a whole: a file that exists is complete."""
    folder = Path(os.environ["DISTFLOW_OUTPUT"]) / RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / result_name(int(os.environ.get("RANK", "0")))
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(result))
    part.replace(path)


if __name__ == "__main__":
    main()
