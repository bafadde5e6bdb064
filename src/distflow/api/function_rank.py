"""The program that each rank of ``distflow.run`` or a ``Launcher`` executes: it calls the function and stores the result.

distflow sends this file to the nodes. It does not import distflow, which the nodes may not have. Its directory there also
contains ``function.pkl`` (the function with its arguments), ``function.json`` (the Python that pickled it, and directories for
``sys.path``), and a copy of the package ``cloudpickle`` that wrote the pickle. The result is a file in the task's output. It
is a pickle of one of these mappings:

* ``{"value": bytes}``, the pickled return value
* ``{"error": bytes, "traceback": str, "name": str}``: the pickled exception (empty if it cannot be pickled), its traceback, and
  its type and message. For an error outside of the function, only ``name`` is not empty.
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
"""The directory in each task's output that contains the results."""
__tracebackhide__ = True
"""The launcher leaves the frames of this module out of tracebacks, because they do not help users."""
_HERE = Path(__file__).resolve().parent


def result_name(rank: int) -> str:
    """Return the name of the file with the result of a rank."""
    return f"rank-{rank}.pkl"


def main() -> None:
    """Call the function and store its result. An ``Exception`` is stored before it ends the process."""
    # Read the environment first, because the function may change it.
    result_path = Path(os.environ["DISTFLOW_OUTPUT"]) / RESULTS / result_name(int(os.environ.get("RANK", "0")))
    metadata = json.loads((_HERE / "function.json").read_text(encoding="utf-8"))
    _check_python(result_path, metadata["python"], metadata["executable"])
    sys.path[1:1] = [os.getcwd(), *(os.path.join(os.getcwd(), path) for path in metadata["paths"])]
    import cloudpickle  # noqa: PLC0415  on a node, it is next to this file

    try:
        function, args, kwargs = pickle.loads((_HERE / "function.pkl").read_bytes())
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            why += "; install missing packages on the nodes, for example with `venv=` of `distflow.run` or `Launcher`"
        _exit_with_error(result_path, f"the function cannot be loaded with {sys.executable}: {why}")
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
        name = traceback.format_exception_only(type(error), error)[-1 - _count_note_lines(error)].strip()
        _store(result_path, {"error": _pickled(cloudpickle, error), "traceback": shown, "name": name})
        raise
    try:
        result = {"value": cloudpickle.dumps(value)}
    except Exception as error:
        hint = "return numbers, strings, tensors, or lists of them"
        _exit_with_error(result_path, f"the return value cannot be pickled: {error}; {hint}")
    _store(result_path, result)
    _leave_group()


def _leave_group() -> None:
    """Close the process group of torch if the function left it open: its threads may abort a process that is exiting."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # Delete unused models first: one that has the last reference to the group could hang (pytorch/pytorch#56297).
        gc.collect()
        distributed.destroy_process_group()


def _check_python(result_path: Path, wanted: str, executable: str) -> None:
    """End the process if another minor version of Python pickled the function, because the byte code is incompatible."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != wanted:
        _exit_with_error(
            result_path,
            f"the function was pickled by Python {wanted} ({executable}), but {sys.executable} is Python {version}. "
            f"Use the same version: set `python=` of `distflow.run` or `Launcher` to the path of a "
            f"Python {wanted} on the nodes",
        )


def _count_note_lines(error: Exception) -> int:
    """Return the number of lines of ``add_note`` that end the text of an exception (Python 3.11 and newer)."""
    return sum(len(str(note).split("\n")) for note in getattr(error, "__notes__", ()))


def _exit_with_error(result_path: Path, message: str) -> NoReturn:
    _store(result_path, {"error": b"", "traceback": "", "name": message})
    raise SystemExit(f"distflow: error: {message}")


def _pickled(cloudpickle: Any, error: Exception) -> bytes:
    """Return the pickle of an exception, or empty bytes if no pickle of it can be loaded."""
    for one in (error, _Rebuilt(error)):
        with contextlib.suppress(Exception):
            data: bytes = cloudpickle.dumps(one)
            pickle.loads(data)
            return data
    return b""


class _Rebuilt:
    """Pickles an exception whose plain pickle cannot be loaded, such as one whose constructor does not accept its ``args``."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def _store(result_path: Path, result: dict[str, Any]) -> None:
    """Write the result atomically: if the file exists, it is complete."""
    result_path.parent.mkdir(exist_ok=True)
    part = result_path.with_suffix(".part")
    part.write_bytes(pickle.dumps(result))
    part.replace(result_path)


if __name__ == "__main__":
    main()
