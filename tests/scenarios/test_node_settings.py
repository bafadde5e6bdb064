"""The options ``--python``, ``--setup`` and ``--env`` of ``workflow submit``, and the report of a Python without torch."""

from __future__ import annotations

import sys
from pathlib import Path

from scenarios.conftest import Cli
from scenarios.lab import TORCHRUN

SPEC = """
workflow:
  name: shows
  groups:
  - name: train
    tasks:
    - name: one
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'command -v python3; echo "$GREETING $OMP_NUM_THREADS $FROM_SETUP"; test -e GO']
      environment: {GREETING: from the spec}
"""


def make_environment(folder: Path) -> Path:
    """Make a directory with ``bin/python3``, as in a virtual environment, and return the path of this Python."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python3"
    python.symlink_to(getattr(sys, "_base_executable", sys.executable))
    return python


def test_submit_options_override_pool_and_spec_and_are_kept_by_a_restart(cli: Cli) -> None:
    python = make_environment(cli.folder / "environment")
    cli.configure(setup="export FROM_SETUP=pool", environment="{GREETING: from the pool}")
    spec = cli.spec(SPEC.replace("GO", f"{cli.folder}/go"))
    options = ["--python", "~/environment/bin/python3", "--setup", "export FROM_SETUP=option"]
    done = cli.run("workflow", "submit", spec, *options, "--env", "GREETING=hello", "--env", "OMP_NUM_THREADS=7", "--wait")
    output = f"[one] {python}\n[one] hello 7 option\n"
    assert (done.code, done.out) == (1, f"shows-1\n{output}"), done.err
    (cli.folder / "go").touch()
    done = cli.run("workflow", "restart", "shows-1", "--wait")
    assert (done.code, done.out) == (0, f"shows-2\n{output}"), done.err
    # A new `--env` replaces only this variable. The other options are kept.
    done = cli.run("workflow", "submit", "shows-2", "--env", "GREETING=again", "--wait")
    assert (done.code, done.out) == (0, f"shows-3\n[one] {python}\n[one] again 7 option\n"), done.err


def test_wrong_settings_are_refused(cli: Cli) -> None:
    for option, value, message in (
        ("--python", "", "--python `` is not the path or the name of a program"),
        ("--python", "-c", "--python `-c` is not the path or the name of a program"),
        ("--env", "1A=x", "--env: `1A` is not a valid name of a variable"),
        ("--env", "MASTER_PORT=x", "--env: error: one: MASTER_PORT: x: the port must be a number"),
        ("--env", "SECRET", "--env `SECRET` is not of the form NAME=VALUE\nwrite SECRET=value\n"),
    ):
        done = cli.run("workflow", "submit", cli.spec(SPEC), option, value)
        assert (done.code, done.out) == (2, "")
        assert message in done.err


def test_a_python_without_torch_is_reported_with_the_option_to_add(cli: Cli) -> None:
    # A stand-in for torch, whose torchrun only prints that it was started.
    python = make_environment(cli.folder / "with-torch")
    package = cli.folder / "with-torch" / "lib" / "python3.x" / "site-packages" / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "distributed" / "run.py").write_text("import sys\nprint('torchrun', *sys.argv[-1:])\n")
    python.with_name("python").symlink_to("python3")
    bare = make_environment(cli.folder / "bare")
    cli.configure(python=str(bare))
    spec = cli.spec(TORCHRUN)
    remedy = f"{python.with_name('python')} has it: add `--python {python.with_name('python')}`"
    done = cli.run("workflow", "submit", spec, "--preflight")
    assert (done.code, done.out) == (3, "")
    assert f"error: local: torch is not installed for {bare}\n    {remedy}" in done.err
    done = cli.run("workflow", "submit", spec, "--wait")
    assert (done.code, done.out) == (1, "trains-1\n")
    assert cli.tasks("trains-1")["one"]["status"] == "FAILED_START_ERROR"
    assert f"torchrun cannot start: torch is not installed for {bare}; {remedy}" in done.err
    path = f"PYTHONPATH={package.parent}"
    done = cli.run("workflow", "submit", spec, "--python", str(python), "--env", path, "--wait")
    assert (done.code, done.out) == (0, "trains-2\n[one] torchrun train.py\n"), done.err
