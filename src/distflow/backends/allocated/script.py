"""The commands that start the resident program on each node of an allocation.

The resident program (``runtime/services/resident.py``) runs as long as the allocation, and starts distflow's commands on its
node.
"""

from __future__ import annotations

import importlib.resources

from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.shell import quote

__all__ = ["resident_command", "resident_script"]


def resident_script(python: str, idle_release_s: float, components: int) -> str:
    """Return a shell script that starts the resident program on all nodes of its Slurm job, with one Slurm task per node.

    The script needs no other file. The script and its job end when no node has had a process or a connection for
    ``idle_release_s``. ``python`` is the value in the configuration. ``components`` is the number of components of a
    heterogeneous job.
    """
    source = _source()
    command = quote(python_argv(python))
    return f"""\
#!/bin/sh
resident={quote([source])}
exec {command} -I -S -c "$resident" batch {idle_release_s:g} {components} "$resident" {command}
"""


def resident_command(python: str, allocation_id: str, host: str, idle_release_s: float) -> tuple[str, ...]:
    """Return the command of a container that is a node of an allocation. It needs no file of distflow.

    ``host`` is the name by which relays find the resident program. The container ends when it has had no process and no
    connection for ``idle_release_s``. ``python`` is the value in the configuration.
    """
    return (*python_argv(python), "-I", "-S", "-c", _source(), "pod", allocation_id, host, f"{idle_release_s:g}")


def _source() -> str:
    return importlib.resources.files("distflow.runtime.services").joinpath("resident.py").read_text()
