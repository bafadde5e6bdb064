"""Guards for every test: a clean environment and an empty home, so that no test reads the real ``~/.ssh`` or state."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from distflow.testing.kubernetes import KubernetesCluster, KubernetesSource, find_kubernetes
from distflow.testing.ray import RayCluster, missing_ray
from distflow.testing.s3 import S3Server, missing_rclone
from distflow.testing.slurm import Slurm, missing_slurm

gc.disable()  # until all tests are collected: meanwhile, collecting garbage would free nothing and take a fifth of the time

# No test depends on the speed of the machine.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("untimed")

# A shell ignores SIGINT in its background processes, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _use_memory_for_temporary_files() -> None:
    """Put ``tmp_path`` into ``/dev/shm``, if the machine has enough memory for a whole run and ``TMPDIR`` is not set.

    On ext4, tests that create and remove many files need up to twice the processor time: ext4 searches an inode for each new
    file that was not in use in the last 5 s.
    """
    memory = "/dev/shm"
    if {"TMPDIR", "PYTEST_DEBUG_TEMPROOT"} & os.environ.keys() or not os.access(memory, os.W_OK):
        return
    file_system = os.statvfs(memory)
    free = min(file_system.f_bavail * file_system.f_frsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    if free >= 8 << 30 and not file_system.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = memory


_use_memory_for_temporary_files()

# pyenv starts Python by a shell script, which takes ten times as long as the start of the interpreter.
if Path(shutil.which("python3") or "").parent.name == "shims":
    os.environ["PATH"] = f"{sys.base_prefix}/bin:{os.environ['PATH']}"

_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYENV_VERSION", "PYENV_ROOT", "LD_LIBRARY_PATH", "CI")


def pytest_xdist_auto_num_workers() -> int:
    """Three for each core, because most of the long tests wait for other processes."""
    return 3 * len(os.sched_getaffinity(0))


_WAITING = (
    "tests/scenarios/test_ssh_networks.py",
    "tests/scenarios/test_slurm_faults.py",
    "tests/scenarios/test_slurm.py",
    "tests/contract/test_silence.py",
    "tests/scenarios/test_diagnose.py",
    "tests/scenarios/test_ssh_faults.py",
    "tests/scenarios/test_resume.py::test_a_run_with",
    "tests/integration/slurm/test_many_jobs.py",
    "tests/chaos/test_slurm.py",
    "tests/scenarios/test_containers.py",
    "tests/scenarios/test_stacks.py",
    "tests/scenarios/test_faults.py",
    "tests/scenarios/test_retries.py",
    "tests/train/test_diagnose.py",
    "tests/contract/test_resident.py",
    "tests/contract/test_allocations.py",
    "tests/scenarios/test_full_state.py",
    "tests/integration/torch",
    "tests/train/test_world.py::test_a_stuck_collective",
    "tests/scenarios/test_rsync_daemon.py",
    "tests/integration/ssh/test_links.py",
)
"""Tests that mostly wait: for timeouts, or for processes on hosts. The longest come first."""
_COMPUTING = (
    "tests/train/test_strategies.py::test_ranks_train",
    "tests/scenarios/test_resume.py",
    "tests/scenarios/test_frameworks.py",
    "tests/scenarios/test_venvs.py",
    "tests/scenarios/test_ui.py",
    "tests/scenarios/test_why.py",
    "tests/train",
    "tests/test_docs.py",
    "tests/scenarios",
)
"""Other tests that take long, and mostly compute. The longest come first."""
_CLUSTERS = {
    "kubernetes_cluster": re.compile(
        r"^tests/(chaos|contract|integration|scenarios)/(.*\[(pods|kubernetes)\b|.*test_kubernetes\.py|kubernetes/)"
    ),
    "ray_cluster": re.compile(r"^tests/(chaos|contract|scenarios)/(.*\[ray\b|test_ray\.py|test_engines\.py::test_the_same)"),
}
"""Fixtures of clusters. Each pattern matches the ids of the tests that one worker runs with the cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that some workers of pytest-xdist begin with tests that wait, and others with tests that compute.

    Each worker gets an equal part of the list, and a worker that is done takes tests from the end of another part. The first
    parts begin with all tests of one cluster each: tests that stop parts of a cluster wait for its other tests, and each worker
    would need 12 s of processor time to start a Ray cluster.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    of_clusters = [[item for item in items if pattern.search(item.nodeid)] for pattern in _CLUSTERS.values()]
    # The test that needs several clusters comes last, when no other test stops parts of the second cluster.
    of_clusters = [sorted(part, key=lambda item: "test_the_same" in item.nodeid) for part in of_clusters if part]
    if not of_clusters:  # `make check`: contract tests wait, and unit tests compute
        _mix(items, lambda item: item.nodeid.startswith("tests/contract/"))
        return
    taken = {item for part in of_clusters for item in part}
    waiting = [item for item in items if item not in taken and item.nodeid.startswith(_WAITING)]
    taken.update(waiting)
    computing = [item for item in items if item not in taken]
    waiting.sort(key=lambda item: _rank(item, _WAITING))
    computing.sort(key=lambda item: _rank(item, _COMPUTING))
    free = max(1, workers - len(of_clusters))
    lanes = (free + 1) // 2
    parts = [*of_clusters, *(waiting[lane::lanes] for lane in range(lanes))]
    size, rest = len(items) // workers, iter(computing)
    own = [list(itertools.islice(rest, size)) for _ in range(workers - len(parts))]
    for part in reversed(parts):
        part.extend(itertools.islice(rest, max(0, size - len(part))))
    items[:] = [item for part in (*parts, *own) for item in part] + list(rest)


def _mix(items: list[pytest.Item], is_first: Callable[[pytest.Item], bool]) -> None:
    """Order items of two kinds so that every part of the list has the same share of each kind."""
    kinds = [item for item in items if is_first(item)], [item for item in items if not is_first(item)]
    places = {item: number / len(kind) for kind in kinds for number, item in enumerate(kind)}
    items.sort(key=places.__getitem__)


def _rank(item: pytest.Item, names: tuple[str, ...]) -> int:
    return next((rank for rank, name in enumerate(names) if item.nodeid.startswith(name)), len(names))


def pytest_collection_finish() -> None:
    """Switch the garbage collector on again, with fewer runs. It ignores the modules and tests that exist now."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop a cluster when the next test does not need it, because even an idle cluster takes processor time."""
    found: Any = item  # pytest has no public way to end a fixture before its scope ends
    for name, pattern in _CLUSTERS.items():
        if nextitem is None or not pattern.search(nextitem.nodeid):
            for fixture in found.session._fixturemanager.getfixturedefs(name, item):
                if fixture.cached_result is not None:
                    fixture.finish(found._request)


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def _clean_environment(_homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `tmp_path_factory.mktemp` would list the directories of all earlier tests each time.
    home = Path(tempfile.mkdtemp(dir=_homes))
    for name in list(os.environ):
        if name not in _KEPT and not name.startswith(("PYTEST", "DISTFLOW_RENEW")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DISTFLOW_STATE", str(home / "state"))
    monkeypatch.setenv("USER", "tester")
    monkeypatch.setenv("LOGNAME", "tester")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster of the fixture `slurm`, for fixtures whose jobs run during several tests."""
    if why := missing_slurm():
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: Slurm) -> Iterator[Slurm]:
    """A Slurm cluster with two idle nodes. All tests share it, so a test that stops one of its daemons starts it again."""
    yield slurm_cluster
    slurm_cluster.cancel_jobs()


_KUBERNETES = find_kubernetes(os.environ, Path(__file__).resolve().parent.parent)
"""Read at import, because `_clean_environment` removes the variables."""


@pytest.fixture(scope="session")
def kubernetes_source() -> KubernetesSource:
    """The source of the Kubernetes cluster: a script that starts one, or the kubeconfig of an existing one."""
    if _KUBERNETES.missing:
        pytest.skip(_KUBERNETES.missing)
    return _KUBERNETES


@pytest.fixture(scope="session")
def kubernetes_cluster(
    kubernetes_source: KubernetesSource, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubernetesCluster]:
    """One cluster for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with KubernetesCluster(folder / "kubernetes", kubernetes_source) as cluster:
        yield cluster


@pytest.fixture
def kubernetes(kubernetes_cluster: KubernetesCluster) -> Iterator[KubernetesCluster]:
    """A Kubernetes cluster with two nodes, which tests share. Each test makes its own namespace."""
    with kubernetes_cluster.shared():
        yield kubernetes_cluster


@pytest.fixture
def lone_kubernetes(kubernetes_cluster: KubernetesCluster) -> Iterator[KubernetesCluster]:
    """The same cluster, without other tests at the same time, so the test may stop parts of the cluster."""
    if not kubernetes_cluster.is_own:
        pytest.skip("the test stops parts of the cluster, and this cluster was not started by the tests")
    with kubernetes_cluster.alone():
        yield kubernetes_cluster


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """The cluster of the fixture `ray`. It uses 1 GB, so `pytest_collection_modifyitems` assigns its tests to one worker.

    The programs that ``RayCluster.python`` runs are forked from a process that has imported Ray.
    """
    if why := missing_ray():
        pytest.skip(why)
    from preloaded import write_program

    python = write_program(tmp_path_factory.mktemp("ray"), tmp_path_factory.getbasetemp(), "ray")
    with RayCluster(python=str(python)) as cluster:
        yield cluster


@pytest.fixture
def ray(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """A Ray cluster with two idle nodes. All tests share it, so a test that kills a node starts it again."""
    yield ray_cluster
    ray_cluster.remove_all()


@pytest.fixture(scope="session")
def running_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for many tests of a worker."""
    if why := missing_rclone():
        pytest.skip(why)
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def forking_site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for the ``PYTHONPATH`` of tasks. Their launchers and ranks are then forked from a process with torch."""
    from preloaded import find_forking_site

    return find_forking_site(tmp_path_factory.getbasetemp())


@pytest.fixture
def forking_programs(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for ``PATH`` with a ``distflow`` that is forked from a process that has imported it."""
    from preloaded import write_program

    return str(write_program(tmp_path, tmp_path_factory.getbasetemp(), "distflow").parent)


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
