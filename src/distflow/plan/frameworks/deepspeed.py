"""DeepSpeed: its launcher on every node, without SSH between them, and a hostfile of all.

The launcher numbers the GPUs of a node from 0 and sets CUDA_VISIBLE_DEVICES itself, so that a task should ask for all GPUs of
its node. A script that calls ``deepspeed.init_distributed`` runs below torchrun, too, which knows no such limit.

Options and format: ``deepspeed/launcher/runner.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from distflow.plan.frameworks.model import ADDRESS, PORT, Place, Started, config_file
from distflow.plan.model import ATTEMPT_DIR, address_of

__all__ = ["deepspeed"]


def deepspeed(place: Place) -> Started:
    """Return the command below ``deepspeed --no_ssh``, with the hostfile."""
    python = place.python
    hosts = "".join(f"{address_of(item.task)} slots={item.size}\n" for item in place.world.tasks)
    words = ["deepspeed", "--hostfile", f"{ATTEMPT_DIR}/config/hostfile", "--no_ssh", "--node_rank", place.node_rank]
    words += ["--master_addr", ADDRESS, "--master_port", PORT]
    words += ["--module"] if python.is_module else []
    return Started(argv=(*words, python.target, *python.arguments), files=(config_file("hostfile", hosts),))
