"""JAX: the coordinator's address and the number of the process, one process for each task; it uses all GPUs that it sees.

``jax.distributed.initialize()`` reads only the address by itself; the script hands over the other two::

    jax.distributed.initialize(
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])
    )

Source: ``jax/_src/distributed.py`` of JAX 0.10.2.
"""

from __future__ import annotations

from distflow.plan.frameworks.model import ADDRESS, PORT, Place, Started

__all__ = ["jax"]


def jax(place: Place) -> Started:
    """Return the command as it is, with the coordinator in its environment."""
    environment = {
        "JAX_COORDINATOR_ADDRESS": f"{ADDRESS}:{PORT}",
        "JAX_NUM_PROCESSES": place.nodes,
        "JAX_PROCESS_ID": place.node_rank,
        # Without it processes on CPUs find each other, but cannot compute together.
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    return Started(argv=place.argv, environment=environment)
