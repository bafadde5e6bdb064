"""The program of a rank that calls a function of ``distflow.run``. It is sent to the nodes, and imports nothing of distflow.

Its directory contains ``function.pkl``, the function with its arguments, and ``cloudpickle``, in the version that wrote it. The
result is a file of the task's output. It is a pickle of one of these mappings:

* ``{"value": bytes}``, the pickled return value
* ``{"error": bytes, "traceback": str, "name": str}``: the pickled exception (empty if it cannot be pickled), its traceback, and
  its type and message
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
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
    # The function may change the environment.
    place = Path(os.environ["DISTFLOW_OUTPUT"]) / RESULTS / result_name(int(os.environ.get("RANK", "0")))
    about = json.loads((_HERE / "function.json").read_text(encoding="utf-8"))
    _check_python(place, about["python"], about["executable"])
    sys.path[1:1] = [os.getcwd(), *(os.path.join(os.getcwd(), path) for path in about["paths"])]
    import cloudpickle  # noqa: PLC0415  it is next to this file on a node

    try:
        function, args, kwargs = pickle.loads((_HERE / "function.pkl").read_bytes())
    except Exception as error:
        _refuse(place, f"the function cannot be loaded with {sys.executable}: {type(error).__name__}: {error}")
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
        name = traceback.format_exception_only(type(error), error)[-1].strip()
        _store(place, {"error": _pickled(cloudpickle, error), "traceback": shown, "name": name})
        raise
    try:
        result = {"value": cloudpickle.dumps(value)}
    except Exception as error:
        _refuse(place, f"the return value cannot be pickled: {error}")
    _store(place, result)
    _leave_group()


def _leave_group() -> None:
    """Close the process group of torch if the function left it open: its threads may abort a process that is exiting."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()  # a model that had the last reference to the group could hang: pytorch/pytorch#56297
        distributed.destroy_process_group()


def _check_python(place: Path, wanted: str, executable: str) -> None:
    """End the process if this is another Python than the one that pickled the function: their byte code differs."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != wanted:
        _refuse(
            place,
            f"the function was pickled by Python {wanted} ({executable}), but {sys.executable} is Python {version}. "
            f"Use the same version: pass `python=` with the path of a Python {wanted} on the nodes to distflow.run",
        )


def _refuse(place: Path, message: str) -> NoReturn:
    _store(place, {"error": b"", "traceback": "", "name": message})
    raise SystemExit(f"distflow: error: {message}")


def _pickled(cloudpickle: Any, error: Exception) -> bytes:
    """Return the pickle of an exception, or an empty one if no pickle of it can be loaded."""
    for one in (error, _Rebuilt(error)):
        with contextlib.suppress(Exception):
            data: bytes = cloudpickle.dumps(one)
            pickle.loads(data)
            return data
    return b""


class _Rebuilt:
    """Pickles an exception whose constructor does not accept its ``args``. A plain pickle of it could not be loaded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def _store(place: Path, result: dict[str, Any]) -> None:
    """Write the result as a whole: a file that exists is complete."""
    place.parent.mkdir(exist_ok=True)
    part = place.with_suffix(".part")
    part.write_bytes(pickle.dumps(result))
    part.replace(place)


if __name__ == "__main__":
    main()
