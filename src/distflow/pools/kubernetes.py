"""The settings of a pool on Kubernetes, from the configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distflow.documents.document import View, path_text
from distflow.documents.quantities import parse_duration
from distflow.documents.source import read_text
from distflow.errors import DistflowError
from distflow.pools.model import KubernetesPlatform, KubernetesSettings

__all__ = ["parse_kubernetes"]

_LARGEST_TEMPLATE = 1 << 20
_LONGEST_SHOWN = 200


def parse_kubernetes(pool: View) -> KubernetesSettings:
    """Return the settings for the pods of a pool, and add findings to those of the configuration."""
    item = pool.view("kubernetes")
    default = KubernetesSettings()
    idle_release_s = item.parsed("idle_release", parse_duration)
    if idle_release_s == 0:
        at = path_text((*item.path, "idle_release"))
        item.add(f"`{at}` must be more than 0", "write a duration such as `10m`", key="idle_release")
    platforms = pool.view("platforms")
    return KubernetesSettings(
        context=item.string("context"),
        kubeconfig=_path(item, "kubeconfig"),
        namespace=item.string("namespace"),
        queue=item.string("queue"),
        scheduler=item.string("scheduler"),
        service_account=item.string("service_account"),
        image=item.string("image"),
        pod_template=_pod_template(item),
        priority_classes=MappingProxyType(_strings(item.view("priority_classes"))),
        gpu_resource=item.string("gpu_resource") or default.gpu_resource,
        host_network=item.flag("host_network") or False,
        idle_release_s=default.idle_release_s if idle_release_s is None else idle_release_s,
        platforms=MappingProxyType({name: _platform(pool.view("platforms", name)) for name in platforms.keys}),
    )


def _platform(item: View) -> KubernetesPlatform:
    return KubernetesPlatform(
        node_selector=MappingProxyType(_strings(item.view("node_selector"))),
        tolerations=tuple(MappingProxyType(_strings(one)) for one in item.views("tolerations")),
        gpu_resource=item.string("gpu_resource"),
    )


def _strings(item: View) -> dict[str, str]:
    return {key: text for key in item.keys if (text := item.string(key)) is not None}


def _path(item: View, key: str) -> str | None:
    """Return a path, which may be relative to the directory of the configuration or begin with ``~``, as an absolute path."""
    named = item.string(key)
    return None if named is None else os.path.abspath(os.path.join(os.path.dirname(item.mark.file), os.path.expanduser(named)))


def _pod_template(item: View) -> str:
    """Return the pod template as JSON."""
    path = _path(item, "pod_template")
    if path is None:
        return KubernetesSettings().pod_template
    import yaml  # noqa: PLC0415  few configurations have a template

    try:
        found: Any = yaml.safe_load(read_text(path, limit=_LARGEST_TEMPLATE, kind="pod template"))
        if isinstance(found, Mapping) and found.get("kind", "Pod") in ("Pod", "PodTemplate"):
            pod = found.get("template") if found.get("kind") == "PodTemplate" else found
            if isinstance(pod, Mapping) and isinstance(pod.get("spec"), Mapping):
                return json.dumps({key: pod[key] for key in ("metadata", "spec") if key in pod})
        item.add(f"`{path}` is not a pod", "write a pod with `spec`, as for `kubectl create`", key="pod_template")
    except DistflowError as error:
        item.add(error.message, error.hint, key="pod_template")
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:_LONGEST_SHOWN]
        item.add(f"`{path}` is not a pod: {words}", "write a pod in YAML, as for `kubectl create`", key="pod_template")
    return KubernetesSettings().pod_template
