"""Real hosts for chaos: those of the scenarios."""

from __future__ import annotations

from scenarios.conftest import cli, cluster, far_cluster, far_lab, far_ray_pool, has_runtime, hosts, lab, network

__all__ = ["cli", "cluster", "far_cluster", "far_lab", "far_ray_pool", "has_runtime", "hosts", "lab", "network"]
