"""What comes just then: signals and failures that meet the launcher in the middle of a step.

Each script chooses the moment: it does in a step of the launcher what another process may do then, or has a rank wait for it.
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


def test_a_request_to_stop_may_come_while_ranks_are_being_started(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    start_one = SpawnProcess.start

    def and_then_somebody_asks(process):
        start_one(process)
        SpawnProcess.start = start_one
        os.kill(os.getpid(), signal.SIGTERM)

    if __name__ == "__main__":
        SpawnProcess.start = and_then_somebody_asks
        starting.launch(pause, size=2)
    """,
        plain=True,
        TMPDIR=".",
    )
    assert run.wait() == 143, run.stderr
    assert list(run.folder.glob("distflow-ranks-*")) == [], "as it is not, where a signal ends the launcher"


def test_a_request_to_stop_that_comes_with_the_last_failure_starts_nothing_anew(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    kill_late = rank_processes._Watch.kill_late

    def and_then_somebody_asks(watch):
        kill_late(watch)
        if not watch.running:
            os.kill(os.getpid(), signal.SIGTERM)

    if "RANK" in os.environ:
        os.write(1, b"{}\\n")
        sys.exit(7)
    rank_processes._Watch.kill_late = and_then_somebody_asks
    sys.exit(main(["--max-restarts", "1", __file__]))
    """,
        plain=True,
    )
    assert run.wait() == 7, run.stderr
    assert len(run.records) == 1


def test_a_rank_that_cannot_be_started_ends_those_that_were(start: Start) -> None:
    """The first of two waits for ever, and a process of Python waits at its end for those that it has started."""
    run = start(
        LAUNCHER
        + """
    start_one = SpawnProcess.start

    def full(process):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    def and_then_there_is_no_room(process):
        start_one(process)
        SpawnProcess.start = full
        os.write(1, json.dumps({"pid": process.pid}).encode() + b"\\n")

    if __name__ == "__main__":
        SpawnProcess.start = and_then_there_is_no_room
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


def test_a_rank_that_hangs_before_it_leads_a_group_is_killed_when_its_grace_is_over(start: Start) -> None:
    """As one does that imports the script for a function, where that takes SIGTERM for itself and then waits for a disk."""
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


def test_a_script_may_take_sigterm_before_its_function_is_called(start: Start) -> None:
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


def test_a_rank_that_was_killed_is_blamed_although_its_end_is_seen_after_what_its_peer_says(start: Start) -> None:
    run = start(
        """
        import os, pathlib, signal
        if os.environ["RANK"] == "1":
            # It holds much memory: the kernel has closed its connections, and takes its time to end it.
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


def test_a_rank_that_lost_one_that_was_asked_to_stop_has_not_failed(start: Start) -> None:
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
    assert not run.error_file.exists(), "to be stopped is no failure"


def test_a_failure_that_was_followed_by_another_attempt_is_not_that_of_the_task(start: Start) -> None:
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


def test_what_a_killed_launcher_leaves_goes_with_its_attempt(start: Start, tmp_path: Path) -> None:
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

    gone = start("raise ValueError", DISTFLOW_ATTEMPT_DIR=str(tmp_path / "nowhere"), TMPDIR=str(elsewhere))
    assert gone.wait() == 1
    assert gone.error["message"]["message"] == "ValueError: "
    assert list(elsewhere.iterdir()) == []


def test_a_request_to_stop_may_come_while_the_launcher_begins_to_listen(start: Start) -> None:
    run = start(
        LAUNCHER
        + """
    set_wakeup_fd = signal.set_wakeup_fd

    def and_somebody_asks(*given, **named):
        signal.set_wakeup_fd = set_wakeup_fd
        os.kill(os.getpid(), signal.SIGTERM)
        return set_wakeup_fd(*given, **named)

    if "RANK" in os.environ:
        os.write(1, b"{}\\n")
        sys.exit()
    signal.set_wakeup_fd = and_somebody_asks
    sys.exit(main([__file__]))
    """,
        plain=True,
    )
    assert run.wait() == -signal.SIGTERM
    assert run.records == []
