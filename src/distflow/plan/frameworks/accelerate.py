"""Hugging Face Accelerate: ``accelerate launch`` on every node.

With several ranks a node it runs torchrun (``--multi_gpu``, also where there is no GPU), with one it starts the script as it
is, which then finds its rank in the variables that every task of one rank has. ``--same_network`` is what it calls torchrun's
static rendezvous, the one that keeps the ranks. It divides the ranks evenly among the nodes.

Options: ``accelerate/commands/launch.py`` of Accelerate 1.15.
"""

from __future__ import annotations

from distflow.plan.frameworks.model import ADDRESS, PORT, Place, Started

__all__ = ["accelerate"]


def accelerate(place: Place) -> Started:
    """Return the command below ``accelerate launch``; a task that asks for no GPU at all trains on the CPU."""
    python, on_cpu = place.python, place.resource.gpu == 0
    words = ["accelerate", "launch", "--num_machines", place.nodes, "--num_processes", str(place.world.world_size)]
    words += ["--machine_rank", place.node_rank, "--main_process_ip", ADDRESS, "--main_process_port", PORT]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {}
    if place.ranks.size > 1:
        words += ["--multi_gpu", "--same_network"]
        environment = {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    elif on_cpu:
        words += ["--cpu"]
    words += ["--module"] if python.is_module else []
    return Started(argv=(*words, python.target, *python.arguments), environment=environment)
