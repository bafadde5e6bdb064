"""MPI and Horovod: the lead starts all processes over SSH of its own; the other tasks hold their nodes for them.

Both therefore need what distflow itself does not: a login without a password from the lead's node to the others, and the
program at the same path on all of them.

Options: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html and
https://horovod.readthedocs.io/en/stable/running_include.html
"""

from __future__ import annotations

from distflow.plan.frameworks.model import Place, Started
from distflow.plan.model import address_of

__all__ = ["horovod", "mpi"]

_HOLD = ("sh", "-c", "echo 'the lead starts the processes of this node; it is held for them'; exec sleep 2147483647")


def mpi(place: Place) -> Started:
    """Return the command below Open MPI's ``mpirun``, which hands the variables of the spec on."""
    if not place.is_master:
        return Started(argv=_HOLD)
    exported = ("MASTER_ADDR", "MASTER_PORT", *sorted({*place.given} - {"MASTER_ADDR", "MASTER_PORT"}))
    words = ["mpirun", "-np", str(place.world.world_size), "--host", _hosts(place)]
    words += [word for name in exported for word in ("-x", name)]
    return Started(argv=(*words, *place.argv))


def horovod(place: Place) -> Started:
    """Return the command below ``horovodrun``, with Gloo as the controller: it needs no MPI."""
    if not place.is_master:
        return Started(argv=_HOLD)
    words = ["horovodrun", "--gloo", "-np", str(place.world.world_size), "-H", _hosts(place)]
    return Started(argv=(*words, *place.argv))


def _hosts(place: Place) -> str:
    return ",".join(f"{address_of(item.task)}:{item.size}" for item in place.world.tasks)
