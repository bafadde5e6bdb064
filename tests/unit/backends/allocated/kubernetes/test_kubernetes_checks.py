"""The checks of a pool on Kubernetes, with an API server that refuses calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distflow.backends.allocated.engine import RequestRefused
from distflow.backends.allocated.kubernetes.api import ApiError, KubernetesApi
from distflow.backends.allocated.kubernetes.kubernetes_checks import check_kubernetes
from distflow.pools.model import KubernetesSettings, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class _Api(KubernetesApi):
    """An API server without pods that refuses one kind of call."""

    def __init__(self, refused: str) -> None:
        super().__init__(KubernetesSettings(context="lab"))
        self._refused_call = refused

    @property
    def namespace(self) -> str:
        return "team"

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        if f"{method} {path}".startswith(self._refused_call):
            raise ApiError(403, "forbidden")
        return {
            "gitVersion": "v1.34",
            "status": {"allowed": True},
            "metadata": {"name": "x", "uid": "u"},
            "items": [{}] if path == "/api/v1/nodes" else [],
        }


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("GET /version", "Kubernetes of unknown version, namespace `team`"),
        ("DELETE ", "of this check may remain: forbidden"),
    ],
)
def test_a_refused_call_is_a_finding(refused: str, message: str) -> None:
    pool = Pool(name="k", backend="kubernetes", nodes=(), kubernetes=KubernetesSettings(image="i:1"))
    findings = list(check_kubernetes(pool, _Api(refused)))
    assert any(message in one.message for one in findings)


def test_a_pod_without_a_service_account_token_is_not_blamed_on_a_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    api = KubernetesApi(KubernetesSettings())
    with pytest.raises(RequestRefused, match=r"^the kubeconfig cannot be used: "):
        api.call("GET", "/version")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(RequestRefused, match=r"^there is no kubeconfig, and the service account of this pod cannot be used: "):
        api.call("GET", "/version")
