"""Races in the launcher: signals and failures that come in the middle of a step.

Each script chooses the moment: it replaces a step of the launcher by one that also sends the signal, or a rank waits for it.
"""

from __future__ import annotations

import signal
from pathlib import Path

from distflow.testing.waiting import is_alive, wait_until
from train.conftest import DEADLINE_S, Start

LAUNCHER = """
    import errno, json, os, pathlib, signal, sys
    from multiprocessing.context import SpawnProcess
    from distflow.train.launcher import rank_processes
    from distflow.train.launcher import starting
    from distflow.train.launch import main

    def pause():
        os.write(1, json.dumps({"pid": os.getpid(), "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}).encode() + b"\\n")
        while True:
            signal.pause()
"""


def test_sigterm_while_ranks_are_started_stops_them(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    start_one = SpawnProcess.start

    def start_and_send_sigterm(process):
        start_one(process)
        SpawnProcess.start = start_one
        os.kill(os.getpid(), signal.SIGTERM)

    if __name__ == "__main__":
        SpawnProcess.start = start_and_send_sigterm
        starting.launch(pause, size=2)
    """,
        plain=True,
        TMPDIR=".",
    )
    assert run.wait() == 143, run.stderr
    assert list(run.folder.glob("distflow-ranks-*")) == [], "the launcher has removed its directory"


def test_sigterm_at_the_moment_of_a_failure_prevents_the_restart(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    kill_late = rank_processes._Watch.kill_late

    def kill_late_and_send_sigterm(watch):
        kill_late(watch)
        if not watch.running:
            os.kill(os.getpid(), signal.SIGTERM)

    if "RANK" in os.environ:
        os.write(1, b"{}\\n")
        sys.exit(7)
    rank_processes._Watch.kill_late = kill_late_and_send_sigterm
    sys.exit(main(["--max-restarts", "1", __file__]))
    """,
        plain=True,
    )
    assert run.wait() == 7, run.stderr
    assert len(run.records) == 1


def test_a_rank_that_cannot_be_started_ends_the_started_ones(start: Start) -> None:
    """The first of two ranks never ends by itself, and Python waits at its exit for the processes that it has started."""
    run = start(
        LAUNCHER
        + """
    start_one = SpawnProcess.start

    def fail(process):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    def start_then_fail(process):
        start_one(process)
        SpawnProcess.start = fail
        os.write(1, json.dumps({"pid": process.pid}).encode() + b"\\n")

    if __name__ == "__main__":
        SpawnProcess.start = start_then_fail
        starting.launch(pause, size=2)
    """,
        plain=True,
        TMPDIR=".",
    )
    [first, *_] = run.wait_for_records(1)
    wait_until(lambda: not is_alive(first["pid"]), DEADLINE_S, "end of the rank that was started")
    assert run.wait() == 1
    assert "Resource temporarily unavailable" in run.stderr
    assert list(run.folder.glob("distflow-ranks-*")) == []


def test_a_rank_that_hangs_in_the_import_of_its_script_is_killed_after_the_grace_period(start: Start) -> None:
    """It hangs while it imports the script, which ignores SIGTERM. It does not lead a process group yet."""
    run = start(
        LAUNCHER
        + """
    if __name__ == "__main__":
        starting.launch(pause, size=1, stop_grace_s=0.1)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pause()
    """,
        plain=True,
    )
    [rank] = run.wait_for_records(1)
    run.process.terminate()
    wait_until(lambda: not is_alive(rank["pid"]), DEADLINE_S, "end of the rank")
    assert run.wait() == 143, run.stderr


def test_a_script_can_handle_sigterm_before_its_function_is_called(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    def save(*_):
        pathlib.Path("checkpoint").touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    if __name__ == "__main__":
        starting.launch(pause, size=1)
    """,
        plain=True,
    )
    run.wait_for_records(1)
    run.process.terminate()
    assert run.wait() == 143, run.stderr
    assert (run.folder / "checkpoint").exists()


def test_a_killed_rank_is_named_although_its_disconnected_peer_fails_first(start: Start) -> None:
    run = start(
        """
        import os, pathlib, signal
        if os.environ["RANK"] == "1":
            # As with much memory: the kernel has closed the connections of this process, but takes long to end it.
            signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            pathlib.Path("lost").touch()
            while True:
                signal.pause()
        while not pathlib.Path("lost").exists():
            os.sched_yield()
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        """,
        "--size", "2", "--failure-grace", "100",
    )  # fmt: skip
    assert run.wait() == 128 + signal.SIGKILL, run.stderr
    assert (run.error["rank"], run.error["signal"]) == (1, "SIGKILL")


def test_a_rank_that_loses_a_stopped_peer_has_not_failed(start: Start) -> None:
    run = start(
        """
        import os, pathlib, signal, sys
        def lost(*_):
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, lost)
            pathlib.Path("ready").touch()
            while True:
                signal.pause()
        while not pathlib.Path("ready").exists():
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        "--size", "2", "--max-restarts", "1",
    )  # fmt: skip
    assert run.wait() == 143, run.stderr
    assert not run.error_file.exists(), "a requested stop is not a failure"


def test_a_failure_before_a_restart_is_not_reported_as_the_failure_of_the_task(start: Start) -> None:
    run = start(
        """
        import os, signal
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("of the attempt before")
        os.write(1, b"{}\\n")
        signal.pause()
        """,
        "--max-restarts", "1",
    )  # fmt: skip
    run.wait_for_records(1)
    run.process.terminate()
    assert run.wait() == 143, run.stderr
    assert "of the attempt before" in run.stderr
    assert not run.error_file.exists()


def test_a_killed_launcher_leaves_files_only_in_the_directory_of_its_attempt(start: Start, tmp_path: Path) -> None:
    attempt, elsewhere = tmp_path / "attempt", tmp_path / "elsewhere"
    attempt.mkdir()
    elsewhere.mkdir()
    script = """
        import os, signal
        os.write(1, b"{}\\n")
        signal.pause()
    """
    run = start(script, DISTFLOW_ATTEMPT_DIR=str(attempt), TMPDIR=str(elsewhere))
    run.wait_for_records(1)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    assert [path.name.rpartition("-")[0] for path in attempt.iterdir()] == ["distflow-ranks"]
    assert list(elsewhere.iterdir()) == []

    without_directory = start("raise ValueError", DISTFLOW_ATTEMPT_DIR=str(tmp_path / "nowhere"), TMPDIR=str(elsewhere))
    assert without_directory.wait() == 1
    assert without_directory.error["message"]["message"] == "ValueError: "
    assert list(elsewhere.iterdir()) == []


def test_sigterm_while_the_launcher_installs_its_handlers_ends_it(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    set_wakeup_fd = signal.set_wakeup_fd

    def set_wakeup_fd_after_sigterm(*given, **named):
        signal.set_wakeup_fd = set_wakeup_fd
        os.kill(os.getpid(), signal.SIGTERM)
        return set_wakeup_fd(*given, **named)

    if "RANK" in os.environ:
        os.write(1, b"{}\\n")
        sys.exit()
    signal.set_wakeup_fd = set_wakeup_fd_after_sigterm
    sys.exit(main([__file__]))
    """,
        plain=True,
    )
    assert run.wait() == -signal.SIGTERM
    assert run.records == []
