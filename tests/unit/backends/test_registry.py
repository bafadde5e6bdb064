"""Backends that this version and this operating system have."""

from __future__ import annotations

import sys

import pytest

from distflow.backends.registry import require_supported
from distflow.errors import InputError
from distflow.pools.model import Pool


def pool(backend: str) -> Pool:
    return Pool(name="lab", backend=backend, nodes=())


def test_a_mac_can_submit_but_cannot_run_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    require_supported(pool("local"))
    monkeypatch.setattr(sys, "platform", "darwin")
    require_supported(pool("ssh"))
    with pytest.raises(InputError, match="only on Linux") as caught:
        require_supported(pool("local"))
    assert "--hostfile" in (caught.value.hint or "")


def test_the_error_for_an_unknown_backend_lists_the_backends() -> None:
    with pytest.raises(InputError, match="pool `lab` has `backend: cloud`") as caught:
        require_supported(pool("cloud"))
    assert caught.value.hint == "available: local, ssh, slurm, kubernetes, ray"
