"""Lines of the kernel's log. Those of Linux 6.18 were recorded. The others were written from the sources of the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.runtime.guard.kernel_log import KernelLogLine, Kill, find_entries, kills, named_pids, parse, select_entries

LINUX_6 = """\
<4>[24532.387442] python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
<6>[24532.387959] [  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name
<6>[24532.387964] [  17412]     0 17412    80946    16872    15200     1672         0   180224        0             0 python3
<6>[24532.387968] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,task_memcg=/job,\
task=python3,pid=17412,uid=0
<3>[24532.388003] Memory cgroup out of memory: Killed process 17412 (python3) total-vm:323784kB, anon-rss:60800kB, \
file-rss:6688kB, shmem-rss:0kB, UID:0 pgtables:176kB oom_score_adj:0
<6>[24532.400000] oom_reaper: reaped process 17412 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""
LINUX_5_GLOBAL = """\
[  812.100100][ T4321] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=user.slice,mems_allowed=0,global_oom,\
task_memcg=/user.slice/user-1000.slice/session-3.scope,task=python3,pid=4321,uid=1000
[  812.100200][ T4321] Out of memory: Killed process 4321 (python3) total-vm:9437184kB, anon-rss:8388608kB, file-rss:1024kB, \
shmem-rss:0kB, UID:1000 pgtables:16500kB oom_score_adj:0
"""
LINUX_4_MEMCG = """\
[   99.500000] Task in /docker/4f killed as a result of limit of /docker/4f
[   99.500100] Memory cgroup out of memory: Kill process 2345 (pt_data worker) score 1989 or sacrifice child
[   99.500200] Killed process 2346 (pt_data (worker)) total-vm:1048576kB, anon-rss:524288kB, file-rss:64kB, shmem-rss:0kB
"""
LINUX_3 = """\
[   50.000001] Out of memory: Kill process 2592 (python) score 912 or sacrifice child
[   50.000002] Killed process 2592 (python), UID 1000, total-vm:1332kB, anon-rss:332kB, file-rss:0kB, shmem-rss:0kB
"""
LINUX_2 = "[   50.000002] Killed process 7428, UID 500, (java) total-vm:1332kB, anon-rss:332kB, file-rss:0kB\n"
JOURNAL = """\
[24532.387968] gpu7 kernel: oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task=python3,pid=8,uid=5
[24532.388003] gpu7 kernel: Out of memory: Killed process 8 (python3) total-vm:1kB, anon-rss:1kB, UID:5 pgtables:1kB
"""
XIDS = """\
[  100.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[  101.000000] NVRM: Xid (PCI:0000:17:00): 13, pid=2345, name=python3, Graphics Exception: ESR 0x504648=0x9
[  102.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15
"""


def _never(kill: Kill) -> bool:
    return False


@pytest.mark.parametrize(
    ("text", "kill", "lines"),
    [
        (LINUX_6, (24532.388003, 17412, 0, "/job"), 2),
        (LINUX_5_GLOBAL, (812.1002, 4321, 1000, "/user.slice/user-1000.slice/session-3.scope"), 2),
        (LINUX_4_MEMCG, (99.5002, 2346, None, "/docker/4f"), 2),
        (LINUX_3, (50.000002, 2592, 1000, None), 1),
        (LINUX_2, (50.000002, 7428, 500, None), 1),
        (JOURNAL, (24532.388003, 8, 5, None), 2),
    ],
    ids=["6.18", "5.15", "4.15", "3.10", "2.6.32", "journal"],
)
def test_kills_are_read_from_the_formats_of_all_kernels(
    text: str, kill: tuple[float, int, int | None, str | None], lines: int
) -> None:
    (found,) = kills(parse(text))
    assert ((found.at, found.pid, found.uid, found.cgroup), len(found.lines)) == (kill, lines)
    assert f"Killed process {found.pid}" in found.lines[-1]
    assert not any("kernel:" in line for line in found.lines)


def test_a_kill_of_a_known_process_is_selected_with_its_lines() -> None:
    found = select_entries(parse(LINUX_5_GLOBAL + LINUX_6), {17412, 99}, _never)
    assert found is not None
    assert found["oom_pid"] == 17412
    assert [line.split(":")[0] for line in found["lines"]] == ["oom-kill", "Memory cgroup out of memory"]


def test_a_kill_of_another_process_is_ignored() -> None:
    assert select_entries(parse(LINUX_6), {1}, _never) is None


def test_a_likely_kill_is_selected_if_the_process_is_unknown() -> None:
    found = select_entries(parse(LINUX_5_GLOBAL + LINUX_6), {1}, lambda kill: kill.uid == 0)
    assert found is not None
    assert found["oom_pid"] == 17412


def test_errors_of_gpus_are_selected_without_a_kill() -> None:
    found = select_entries(parse(XIDS), {1}, _never)
    assert found is not None
    assert found["oom_pid"] is None
    assert [line[:12] for line in found["lines"]] == ["NVRM: Xid (P"] * 2


def test_errors_of_other_gpus_do_not_displace_own_errors() -> None:
    flood = XIDS.split("\n", 1)[1] * 20
    found = select_entries(parse(flood + XIDS), {1}, _never, {"0000:17:00"})
    assert found is not None
    assert [line[:25] for line in found["lines"]] == ["NVRM: Xid (PCI:0000:3b:00"]
    assert select_entries(parse(flood), {1}, _never, {"0000:17:00"}) is None


def test_the_first_of_several_kills_and_a_limited_number_of_lines_are_selected() -> None:
    text = "".join(f"[  {i}.000000] Killed process {i} (a) total-vm:1kB\n" for i in range(1, 4)) + XIDS * 20
    found = select_entries(parse(text), {2, 3}, _never)
    assert found is not None
    assert (found["oom_pid"], len(found["lines"])) == (2, 8)


@pytest.mark.parametrize(
    "text", ["", "Killed process 7 (a)", "[nan] Killed process 7", "<6>[ 1.0] Killed process x\n", "\0\xff[["]
)
def test_invalid_lines_are_ignored(text: str) -> None:
    assert select_entries(parse(text), {7}, _never) is None


def test_a_line_is_parsed_without_its_level() -> None:
    assert parse("[    1.500000] Killed process 7 (a)") == [KernelLogLine(1.5, "Killed process 7 (a)")]


def test_process_ids_are_found_in_the_last_lines_and_the_error_file(tmp_path: Path) -> None:
    last_lines = (
        "step 4711 loss 0.1\n  exitcode  : -9 (pid: 11472)  (SIGKILL)\n  traceback : Signal 9 (SIGKILL) received by PID 11473\n"
        "rank 1 was killed by SIGKILL (pid 11474)\nbash: line 1: 11475 Killed   python3 train.py\n"
    )
    (tmp_path / "output.log").write_text("pid 1\n" + "x" * 20_000 + "\n" + last_lines)
    assert named_pids(str(tmp_path), {"pid": 8, "rank": 3}) == {8, 11472, 11473, 11474, 11475}
    assert named_pids(str(tmp_path / "none"), ["no", "mapping"]) == set()


def test_reading_the_log_never_raises() -> None:
    assert find_entries(None, 0.0, set(), is_killed=False) is None
    assert find_entries(float("nan"), float("inf"), set(), is_killed=True) is None
