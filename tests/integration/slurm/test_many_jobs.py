"""Many gangs that wait in the queue of a real Slurm, through a login node over SSH."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from distflow.backends.allocated.backend import open_backend
from distflow.backends.base import AttemptKey, LeaseRequest, LeaseWaits, Observation
from distflow.pools.load import Machine, parse_configuration
from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd, make_key, missing_sshd
from distflow.testing.waiting import wait_until

GANGS = 40
_COUNTING = """#!/bin/sh
date +%s >>{log}
exec {squeue} "$@"
"""


class NoLogs:
    def resume_position(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        raise AssertionError(f"{key.name} has no output ({kind})")

    def has_room(self) -> bool:
        return True

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        raise AssertionError(f"{key.name} has no output ({file}, {offset}, {data!r})")

    def record_heartbeat(self, key: AttemptKey, at: float) -> None:
        pass


@pytest.mark.ssh
@pytest.mark.timeout(300)
def test_many_waiting_gangs_need_few_queries_and_connections(slurm: Slurm, tmp_path: Path) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    log, counting = tmp_path / "queries", tmp_path / "bin"
    counting.mkdir()
    (counting / "squeue").write_text(_COUNTING.format(log=log, squeue=slurm.commands / "squeue"))
    (counting / "squeue").chmod(0o755)
    slurm.run("sbatch", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 600")
    path = f"HOME={tmp_path} PATH={counting}:{slurm.commands}:{os.environ['PATH']}"
    with Sshd(tmp_path / "login", alias="login", user_key=make_key(tmp_path / "key"), options={"SetEnv": path}) as login:
        (tmp_path / "config").write_text(login.client_stanza())
        settings = {"backend": "slurm", "login": "login", "ssh_config": str(tmp_path / "config"), "python": sys.executable}
        machine = Machine(cpus=1, memory=1, gpus=0, python="p")
        text = json.dumps({"pools": {"c": settings | {"root": str(tmp_path / "root")}}})
        pool = parse_configuration(text, "distflow.yaml", root="/r", machine=machine).pools["c"]
        observations: list[Observation] = []
        (tmp_path / "blobs").mkdir()
        backend = open_backend(pool, blobs=tmp_path / "blobs", sink=observations.append, logs=NoLogs())
        connections = 0
        try:
            for number in range(GANGS):
                backend.lease(
                    LeaseRequest(
                        workflow=f"{number:032x}", group="g", attempt=0, nodes={"t": ""}, gpus={"t": 1}, master="t",
                    )
                )  # fmt: skip

            def all_wait() -> bool:
                nonlocal connections
                connections = max(connections, login.connections())
                reasons = {one.workflow for one in observations if isinstance(one, LeaseWaits) and "(" in one.message}
                return len(reasons) == GANGS

            wait_until(all_wait, 120, "Slurm's reason is known for each gang")
            queries = len(log.read_text().splitlines())
            wait_until(lambda: all_wait() and len(log.read_text().splitlines()) >= queries + 2, 60, "squeue runs again")
            backend.keep(())
            wait_until(lambda: len(slurm.jobs()) == 1, 60, "all jobs of the gangs are gone")
        finally:
            backend.close()
    times = [int(line) for line in log.read_text().splitlines()]
    assert max(sum(at <= other < at + 60 for other in times) for at in times) <= 12
    assert connections <= 4
