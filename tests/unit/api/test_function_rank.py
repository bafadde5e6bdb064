"""The program that calls a function in a rank. It runs in a separate process."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle

from distflow.api import function_rank


def test_a_function_of_another_version_of_python_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    shutil.copy(function_rank.__file__, tmp_path / "main.py")
    about = {"python": "3.6", "executable": "/usr/bin/python3.6", "paths": []}
    (tmp_path / "function.json").write_text(json.dumps(about))
    (tmp_path / "function.pkl").write_bytes(b"not a pickle")
    environment = {"DISTFLOW_OUTPUT": str(tmp_path), "RANK": "5", "PYTHONPATH": str(Path(cloudpickle.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.stderr.startswith("distflow: error: the function was pickled by Python 3.6 (/usr/bin/python3.6), but ")
    assert (
        f" is Python {version}. Use the same version: set `python=` of `distflow.run` or `Launcher` to the path of a Python 3.6"
        in done.stderr
    )
    stored = pickle.loads((tmp_path / "distflow-results" / "rank-5.pkl").read_bytes())
    assert stored["name"].startswith("the function was pickled by Python 3.6")
