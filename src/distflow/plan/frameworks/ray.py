"""Ray: the lead starts the head and runs its command in the cluster, the other tasks are its workers.

``distflow.train.raycluster`` does it on the node: it waits until all have joined before the command begins.

Options: https://docs.ray.io/en/latest/cluster/cli.html
"""

from __future__ import annotations

from distflow.plan.frameworks.model import ADDRESS, PORT, Place, Started

__all__ = ["ray"]


def ray(place: Place) -> Started:
    """Return the command of the head, which holds the task's own, or that of a worker."""
    words = ["python3", "-m", "distflow.train.raycluster", "head" if place.is_master else "worker"]
    words += ["--address", f"{ADDRESS}:{PORT}", "--node-address", place.address]
    if place.resource.gpu is not None:
        words += ["--gpus", str(place.resource.gpu)]
    if place.resource.cpu is not None:
        words += ["--cpus", str(place.resource.cpu)]
    if place.is_master:
        words += ["--nodes", place.nodes, "--", *place.argv]
    return Started(argv=tuple(words), environment={"RAY_ADDRESS": f"{ADDRESS}:{PORT}"})
