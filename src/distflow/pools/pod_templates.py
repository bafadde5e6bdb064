"""Merge the pods of tasks with the pod template of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["template_image", "with_template"]


def template_image(template: Mapping[str, Any]) -> str | None:
    """Return the image of the first container of a template; ``None`` if it has none."""
    containers = template.get("spec", {}).get("containers") or [{}]
    image: str | None = containers[0].get("image")
    return image


def with_template(template: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``pod`` merged with ``template``.

    Mappings are merged, and lists are joined. If both have another value for the same key, that of ``pod`` is used. However, a
    volume of ``template`` replaces the volume of ``pod`` with the same name, and a mount replaces the mount at the same path.

    ``pod`` must have exactly one container, and the names of its volumes must begin with ``distflow``.
    """
    merged: dict[str, Any] = _merged(template, pod)
    _clean_up(merged["spec"])
    return merged


def _merged(below: Any, above: Any) -> Any:
    """Return two values of a pod as one: mappings are merged, lists are joined, and other values come from ``above``.

    A ``command`` is not joined: it comes from ``above``. The first container of a template is merged with distflow's container.
    The template's other containers (sidecars) are kept.
    """
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        found = dict(below)
        for key, value in above.items():
            if key == "containers" and isinstance(below.get(key), list) and below[key]:
                found[key] = [_merged(below[key][0], value[0]), *below[key][1:]]
            elif key == "command":
                found[key] = value
            else:
                found[key] = _merged(below[key], value) if key in below else value
        return found
    if isinstance(below, list) and isinstance(above, list):
        return [*below, *above]
    return above


def _clean_up(spec: dict[str, Any]) -> None:
    """Let the volumes and mounts of the template replace distflow's volumes and mounts with the same name or directory.

    Also removes the ``args`` of the template, and those volumes of distflow that are no longer mounted.
    """
    container = spec["containers"][0]
    container.pop("args", None)
    container["volumeMounts"] = _unique(container["volumeMounts"], "mountPath")
    used = {one.get("name") for one in container["volumeMounts"]}
    spec["volumes"] = [
        one for one in _unique(spec["volumes"], "name") if one["name"] in used or not one["name"].startswith("distflow")
    ]


def _unique(items: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    found: dict[Any, Mapping[str, Any]] = {}
    for one in items:
        found.setdefault(one.get(key), one)
    return list(found.values())
