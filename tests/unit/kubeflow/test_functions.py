"""Functions as scripts: their output, and functions that are refused."""

from __future__ import annotations

import contextlib
import functools
import math
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.kubeflow.functions import function_script

OUTSIDE = 1


def _top(lr: float, names: Any = ("a",)) -> None:
    from typing import TypedDict

    class Row(TypedDict):
        lr: float

    rows: list[Unknown] = [Row(lr=lr) for _ in names]  # type: ignore[name-defined]  # noqa: F821  not evaluated
    print(__name__, rows)


def _nested() -> Callable[[int], None]:
    def count(left: int) -> None:
        print(f"""{left}
  |""")
        if left:
            count(left - 1)

    return count


def _closure() -> Callable[[], int]:
    value = 1

    def returns() -> int:
        return value

    return returns


def _uses_modules() -> None:
    print(math.pi, OUTSIDE)


async def _async() -> None:
    pass


class _Method:
    def train(self) -> None:
        pass


def _run(script: str) -> str:
    return subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("function", "arguments", "printed"),
    [
        (_top, {"lr": 0.5, "names": ["a", 'b"\n']}, "__main__ [{'lr': 0.5}, {'lr': 0.5}]\n"),
        (_nested(), {"left": 1}, "1\n  |\n0\n  |\n"),
        (functools.wraps(_nested())(lambda left: None), {"left": 0}, "0\n  |\n"),
    ],
    ids=["top", "nested", "wrapped"],
)
def test_a_script_does_what_the_function_does(function: Any, arguments: dict[str, Any], printed: str) -> None:
    assert _run(function_script(function, arguments)) == printed


exec("def _without_source(): pass")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lambda: None, None, "a lambda cannot be sent to the nodes"),
        (globals()["_without_source"], None, "the source of `_without_source` is not available"),
        (types.FunctionType(_uses_modules.__code__, {}, "renamed"), None, "does not begin with `def "),
        (_closure(), None, "`returns` uses `value` from outside the function, but only its own source is sent"),
        (_uses_modules, None, "`_uses_modules` uses `OUTSIDE` and `math`"),
        (_async, None, "`_async` is an `async` function"),
        (_Method().train, None, "is not a function defined with `def`"),
        (functools.partial(_top, 1), None, "is not a function defined with `def`"),
        (print, None, "is not a function defined with `def`"),
        ("train.py", None, "`'train.py'` is not a function"),
        (_top, {"rate": 1}, "`func_args` does not fit `_top`: missing a required argument: 'lr'"),
        (_top, {"lr": object()}, "the value of `lr` cannot be written as Python code"),
        (_top, {"lr": math.inf}, "the value of `lr` cannot be written"),
    ],
)
def test_a_function_that_cannot_be_sent_is_refused(function: Any, arguments: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        function_script(function, arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(("first_line", "is_refused"), [("", True), ("from __future__ import annotations", False)])
def test_annotations_of_classes_are_checked_unless_python_does_not_evaluate_them(
    first_line: str, is_refused: bool, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"""{first_line}
def train():
    from dataclasses import dataclass

    @dataclass
    class Row:
        rate: float
        kind: Unknown

    size: Local = 1
""")
    train = runpy.run_path(str(file))["train"]
    error = pytest.raises(ValueError, match="`train` uses `Unknown` from outside the function")
    with error if is_refused else contextlib.nullcontext():
        function_script(train, None)
