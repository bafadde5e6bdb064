"""The launcher with real processes as ranks, which do not import torch because the launcher does not need it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distflow.testing.waiting import is_alive, wait_until
from distflow.train.launch import main
from distflow.train.launcher.starting import LayoutError, launch, read_settings
from train.conftest import DEADLINE_S, SOURCES, Start

HELLO = """
    import json, os, sys
    record = {"argv": sys.argv, "path": sys.path[0], "ppid": os.getppid(), "env": dict(os.environ)}
    os.write(1, json.dumps(record).encode() + b"\\n")
"""
WAIT = """
    import json, os, signal, subprocess, sys
    child = subprocess.Popen(["sleep", "600"])
    os.write(1, json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), "child": child.pid}).encode() + b"\\n")
    signal.pause()
"""


def test_each_rank_gets_the_environment_of_torchrun(start: Start) -> None:
    run = start(
        HELLO, "--offset", "2", "--size", "2", "--world_size", "6", "--master-addr", "10.0.0.1", "--master-port", "29123",
        arguments=("--epochs", "3", "-m"),
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    first, second = sorted(run.records, key=lambda record: record["env"]["RANK"])
    assert first["argv"] == ["script.py", "--epochs", "3", "-m"]
    assert first["path"] == str(run.folder)
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    expected = {
        "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3",
        "NODE_RANK": "1", "ROLE_RANK": "2", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29123", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": threads,
    }  # fmt: skip
    assert {name: first["env"][name] for name in expected} == expected
    assert (second["env"]["RANK"], second["env"]["LOCAL_RANK"]) == ("3", "1")
    assert first["env"]["TORCHELASTIC_ERROR_FILE"] != second["env"]["TORCHELASTIC_ERROR_FILE"]
    assert first["ppid"] == run.process.pid


def test_flags_come_from_distflow_variables_and_the_number_of_threads_is_kept(start: Start) -> None:
    run = start(
        HELLO, DISTFLOW_RANK_OFFSET="8", DISTFLOW_RANK_SIZE="1", DISTFLOW_WORLD_SIZE="16", MASTER_ADDR="10.0.0.1",
        MASTER_PORT="29500", NODE_RANK="3", NNODES="5", OMP_NUM_THREADS="7", DISTFLOW_WORKFLOW_ID="x-1",
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    environment = run.records[0]["env"]
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == ("8", "16", "3")
    assert (environment["GROUP_WORLD_SIZE"], environment["OMP_NUM_THREADS"]) == ("5", "7")
    assert environment["TORCHELASTIC_RUN_ID"] == "x-1"


def test_a_module_is_run_with_its_arguments(start: Start) -> None:
    run = start("", "-m", "platform", arguments=())
    assert run.wait() == 0, run.stderr
    assert run.stdout.startswith("Linux")


def test_the_rank_that_failed_first_is_named_and_not_its_disconnected_peer(start: Start) -> None:
    """Rank 0 reports a lost peer and ends at once. Rank 1, the cause, does not end after its exception."""
    run = start(
        """
        import atexit, os, pathlib, signal
        raised = pathlib.Path("raised")
        if os.environ["RANK"] == "1":
            atexit.register(signal.pause)
            raised.touch()
            raise ValueError("shapes differ")
        while not raised.exists():
            os.sched_yield()
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        """,
        "--size", "2",
    )  # fmt: skip
    assert run.wait() == 1
    assert run.error["rank"] == 1
    assert run.error["message"]["message"] == "ValueError: shapes differ"
    assert 'raise ValueError("shapes differ")' in run.error["message"]["extraInfo"]["py_callstack"]
    assert "distflow.train.launch: rank 1 failed first" in run.stderr
    assert run.stderr.rstrip().endswith("ValueError: shapes differ")


def test_a_rank_that_hangs_at_exit_after_an_exception_has_failed(start: Start) -> None:
    run = start(
        """
        import atexit, os, signal
        if os.environ["RANK"] == "1":
            atexit.register(signal.pause)
            raise ValueError("shapes differ")
        signal.pause()
        """,
        "--size", "2", "--failure-grace", "0.2",
    )  # fmt: skip
    assert run.wait() == 1
    assert (run.error["rank"], run.error["message"]["message"]) == (1, "ValueError: shapes differ")


def test_a_failing_rank_stops_the_others_with_their_children(start: Start) -> None:
    """A rank that ignores SIGTERM is killed with its child after the grace period."""
    run = start(
        """
        import json, os, pathlib, signal, subprocess, sys
        if os.environ["RANK"] == "1":
            while not pathlib.Path("ready").exists():
                os.sched_yield()
            sys.exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        os.write(1, json.dumps({"pid": os.getpid(), "child": child.pid}).encode() + b"\\n")
        pathlib.Path("ready").touch()
        signal.pause()
        """,
        "--size", "2", "--failure-grace", "0.2",
    )  # fmt: skip
    assert run.wait() == 7
    assert run.error["message"]["message"] == "rank 1 ended with exit code 7"
    record = run.records[0]
    wait_until(lambda: not is_alive(record["pid"]) and not is_alive(record["child"]), 20, "end of the sibling")


def test_a_killed_rank_is_named_with_its_signal(start: Start) -> None:
    run = start(WAIT, "--size", "2")
    pids = {record["rank"]: record["pid"] for record in run.wait_for_records(2)}
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert (run.error["rank"], run.error["pid"], run.error["signal"]) == (1, pids[1], "SIGKILL")
    processes = [record[key] for record in run.records for key in ("pid", "child")]
    wait_until(lambda: not any(map(is_alive, processes)), 20, "the end of all processes")


def test_a_killed_launcher_leaves_no_rank(start: Start) -> None:
    run = start(WAIT, "--size", "2")
    records = run.wait_for_records(2)
    run.process.kill()
    wait_until(lambda: not any(is_alive(record["pid"]) for record in records), 20, "end of all ranks")
    for record in records:
        os.kill(record["child"], signal.SIGKILL)  # only the test can end the child of a killed rank


def test_sigterm_reaches_all_ranks_and_gives_them_time_to_save(start: Start) -> None:
    script = """
        import json, os, pathlib, signal, sys, threading
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        os.write(1, json.dumps({"pid": os.getpid()}).encode() + b"\\n")
        stop.wait()
        pathlib.Path("checkpoint-" + os.environ["RANK"]).touch()
        sys.exit(143)
    """
    run = start(script, "--size", "2")
    run.wait_for_records(2)
    run.process.terminate()
    assert run.wait() == 143
    assert sorted(path.name for path in run.folder.glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-1"]
    assert not run.error_file.exists(), "a requested stop is not a failure"

    one = start(script, "--size", "2")
    os.kill(one.wait_for_records(2)[0]["pid"], signal.SIGTERM)
    assert one.wait() == 143, "SIGTERM of one rank stops the others"
    assert sorted(path.name for path in one.folder.glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-1"]


def test_sighup_is_ignored_under_nohup(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = start(WAIT, "--size", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_for_records(1)

    def signals(kind: str) -> set[int]:
        status = Path(f"/proc/{run.process.pid}/status").read_text()
        mask = int(next(line for line in status.splitlines() if line.startswith(kind)).split()[1], 16)
        return {number for number in range(1, 65) if mask >> (number - 1) & 1}

    wait_until(lambda: signal.SIGQUIT in signals("SigCgt"), DEADLINE_S, "the launcher has installed its last handler")
    assert signal.SIGHUP in signals("SigIgn")
    os.kill(run.process.pid, signal.SIGHUP)
    run.process.terminate()
    assert run.wait() == 143, run.stderr


def test_a_restart_uses_a_new_port(start: Start) -> None:
    run = start(
        """
        import json, os, sys
        record = {name: os.environ[name] for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")}
        os.write(1, json.dumps(record).encode() + b"\\n")
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] != "2")
        """,
        "--max-restarts", "3", "--master-port", "29123",
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    assert [record["TORCHELASTIC_RESTART_COUNT"] for record in run.records] == ["0", "1", "2"]
    ports = [record["MASTER_PORT"] for record in run.records]
    assert ports[0] == "29123"
    assert len(set(ports)) == 3
    assert "restart 2 of 3" in run.stderr


def test_ranks_that_fail_after_sigterm_are_not_restarted(start: Start) -> None:
    script = """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        os.write(1, b"{}\\n")
        while True:
            signal.pause()
    """
    run = start(script, "--size", "2", "--max-restarts", "1")
    run.wait_for_records(2)
    run.process.terminate()
    wait_until(lambda: run.process.poll() is not None or len(run.records) > 2, DEADLINE_S, "end")
    assert len(run.records) == 2
    assert run.wait() == 7


def test_a_function_is_launched_from_a_script(start: Start) -> None:
    """The same script also works under the launcher."""
    script = """
        import json, os, sys
        from distflow.train import launch

        def train(word):
            record = {"rank": os.environ["RANK"], "word": word, "torch": "torch" in sys.modules}
            os.write(1, json.dumps(record).encode() + b"\\n")
            if word == "bad":
                raise ValueError("bad word")

        if __name__ == "__main__":
            launch(train, (sys.argv[1],))
            assert "RANK" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    """
    run = start(script, arguments=("good",), plain=True, DISTFLOW_RANK_SIZE="2")
    assert run.wait() == 0, run.stderr
    assert sorted((record["rank"], record["word"]) for record in run.records) == [("0", "good"), ("1", "good")]
    nested = start(script, "--size", "2", arguments=("good",))
    assert nested.wait() == 0, nested.stderr
    assert len(nested.records) == 2
    bad = start(script, arguments=("bad",), plain=True)
    assert bad.wait() == 1
    assert bad.error["message"]["message"] == "ValueError: bad word"
    assert 'raise ValueError("bad word")' in bad.error["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("source", ["-", "-c"])
def test_a_program_without_a_file_can_launch_only_imported_functions(source: str, tmp_path: Path) -> None:
    """Programs from standard input, from `-c` and in notebooks have no `__file__`."""
    (tmp_path / "training.py").write_text('import os\n\ndef train():\n    os.write(1, os.environ["RANK"].encode() + b"\\n")\n')
    imported = "from distflow.train import launch\nfrom training import train\nlaunch(train, size=2)\nprint('end', __name__)\n"
    own = "from distflow.train import launch\ndef train(): pass\nlaunch(train, size=2)\n"

    def run(text: str) -> subprocess.CompletedProcess[str]:
        arguments = [source] if source == "-" else [source, text]
        return subprocess.run(
            [sys.executable, *arguments], input=text if source == "-" else "", capture_output=True, text=True, cwd=tmp_path,
            timeout=DEADLINE_S, check=False, env={**os.environ, "PYTHONPATH": str(SOURCES)},
        )  # fmt: skip

    done = run(imported)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0", "1", "end __main__"]), done.stderr
    refused = run(own)
    assert refused.returncode == 1
    assert "cannot import `train` or its arguments" in refused.stderr
    assert "this program has no file (it is a notebook, or came from standard input)" in refused.stderr
    assert "%%writefile training.py" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "0", "x.py"], "--size (DISTFLOW_RANK_SIZE) is 0: a machine has at least one rank; give 1 or more"),
        (["--offset", "-1", "x.py"], "--offset (DISTFLOW_RANK_OFFSET) is -1: ranks are counted from 0"),
        (["--offset", "8", "--size", "8", "--world_size", "12", "x.py"], "ranks 8 to 15 do not fit a world of 12"),
        (["--offset", "8", "--size", "8", "--world_size", "12", "x.py"], "or more, or a smaller --size (DISTFLOW_RANK_SIZE)"),
        (["--offset", "8", "--world_size", "8", "x.py"], "--world_size (DISTFLOW_WORLD_SIZE) 9 or more, or a smaller --offset"),
        (["--world_size", "2", "x.py"], "--master-addr is missing"),
        (["--world_size", "2", "--master-addr", "a", "x.py"], "--master-port is missing"),
        (["--world_size", "2", "--max-restarts", "1", "x.py"], "--max-restarts (max_restarts): one machine cannot restart"),
        (["--master-port", "70000", "x.py"], "--master-port 70000: give a port from 1 to 65535"),
        (["--stop-grace", "-1", "x.py"], "--stop-grace (stop_grace_s) is -1: give 0 seconds or more"),
        (["missing.py"], "missing.py: no such script"),
        (["--sise", "2", "x.py"], "--sise"),
    ],
)
def test_a_wrong_command_line_names_flag_and_remedy(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_variable_with_a_wrong_value_is_named() -> None:
    with pytest.raises(LayoutError, match="DISTFLOW_RANK_SIZE=eight: not a number"):
        read_settings({"DISTFLOW_RANK_SIZE": "eight"})
    with pytest.raises(LayoutError, match=r"^MASTER_PORT=70000: give a port"):
        read_settings({"MASTER_PORT": "70000"})


def test_launch_refuses_a_local_function_and_another_thread() -> None:
    with pytest.raises(TypeError, match="define the function at the top level of a module"):
        launch(lambda: None)
    with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match="call it in the main thread"):
        threads.submit(launch, print).result()


def test_the_launcher_does_not_import_torch_or_numpy() -> None:
    code = "import sys, distflow.train.launch, distflow.train; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert done.stdout == "set()\n"
