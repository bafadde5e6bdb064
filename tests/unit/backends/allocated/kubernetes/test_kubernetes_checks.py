"""The checks of a pool on Kubernetes, with an API server that refuses calls."""

from __future__ import annotations

import sys
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
    """An API server with the given objects that refuses one kind of call."""

    def __init__(self, refused: str = "-", **objects: dict[str, Any]) -> None:
        super().__init__(KubernetesSettings(context="lab"))
        self._refused_call = refused
        self._objects = {"nodes": {}, **objects}

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
            "items": [self._objects[kind]] if (kind := path.rpartition("/")[2]) in self._objects else [],
        }


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("GET /version", "Kubernetes of unknown version, namespace `team`"),
        ("DELETE ", "of this check may remain: forbidden"),
    ],
)
def test_a_refused_call_is_a_finding(refused: str, message: str) -> None:
    assert any(message in one for one in _messages(_Api(refused)))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("kubernetes.")] + ["kubernetes"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert _messages(KubernetesApi(KubernetesSettings())) == ["the package `kubernetes` is not installed"]


def _messages(api: KubernetesApi) -> list[str]:
    pool = Pool(name="k", backend="kubernetes", nodes=(), kubernetes=KubernetesSettings(image="i:1"))
    return [one.message for one in check_kubernetes(pool, api)]


@pytest.mark.parametrize(
    ("used", "message"),
    [("2000m", "quota `cpus` is used up: cpu 2000m of 2"), ("1999m", "quota `cpus` has room for pods and ConfigMaps")],
)
def test_the_quantities_of_a_quota_may_have_different_units(used: str, message: str) -> None:
    pytest.importorskip("kubernetes")
    quota = {"metadata": {"name": "cpus"}, "status": {"hard": {"cpu": "2"}, "used": {"cpu": used}}}
    assert message in _messages(_Api(resourcequotas=quota))


def test_a_quota_for_other_objects_than_pods_is_not_reported_as_used_up() -> None:
    pytest.importorskip("kubernetes")
    counts = {"services.loadbalancers": "0", "requests.storage": "0"}
    quota = {"metadata": {"name": "objects"}, "status": {"hard": counts, "used": counts}}
    assert "quota `objects` has room for pods and ConfigMaps" in _messages(_Api(resourcequotas=quota))


@pytest.mark.parametrize(("written", "shown"), [("3.12.1", "3.12.1"), ("not a version", "of unknown version")])
def test_the_python_of_a_pod_is_shown(written: str, shown: str) -> None:
    ended = {"exitCode": 0, "message": written}
    pod = {"status": {"phase": "Succeeded", "containerStatuses": [{"name": "task", "state": {"terminated": ended}}]}}
    assert any(one.endswith(f"`python3` is Python {shown}") for one in _messages(_Api(pods=pod)))


def test_an_invalid_kubeconfig_is_named(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    (tmp_path / "config").write_text("a: [")
    api = KubernetesApi(KubernetesSettings(kubeconfig=str(tmp_path / "config")))
    with pytest.raises(RequestRefused, match=r"^the kubeconfig cannot be used: "):
        api.call("GET", "/version")


def test_inside_a_pod_the_error_names_the_service_account_instead_of_the_kubeconfig(
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
