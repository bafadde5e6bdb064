"""Guards for every test: a clean environment, a home of its own, no way to the real ``~/.ssh`` or state."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test hangs on how fast the machine is at the moment.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("untimed")

# A shell starts what it runs in the background with SIGINT ignored, and processes pass that on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYENV_VERSION", "PYENV_ROOT", "LD_LIBRARY_PATH", "CI")


def pytest_xdist_auto_num_workers() -> int:
    """Two for each core: most of the long tests wait for other processes."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
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


@pytest.fixture
def repository() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent
