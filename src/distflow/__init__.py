"""distflow: declarative distributed training over SSH, Slurm, Kubernetes and Ray.

``submit``, ``get`` and ``list`` return workflows. ``run`` runs a function on all ranks of a gang, and ``Launcher`` runs many
functions. ``Spec``, ``Group``, ``Task`` and others build specs. See ``docs/python.md``, and ``help(distflow.submit)``,
``help(distflow.run)`` and ``help(distflow.Workflow)``. Modules are imported when their names are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers treat this name as true; importing `typing` would take longer than all other imports here
if TYPE_CHECKING:
    from distflow.api.functions import FunctionJob, Launcher, Results, run
    from distflow.api.spec import (
        Checkpoint,
        Dataset,
        DatasetUpdate,
        Elastic,
        File,
        Group,
        Input,
        LauncherOptions,
        Notify,
        Output,
        Ranks,
        Resources,
        Retry,
        Shared,
        Spec,
        Task,
        Timeouts,
        Topology,
    )
    from distflow.api.workflow import GroupInfo, TaskInfo, Workflow, get, list_workflows, submit
    from distflow.errors import DistflowError, WaitTimeout, WorkflowEnded

    list = list_workflows  # noqa: A001  `distflow.list()` reads as `distflow list`

__all__ = [
    "Checkpoint",
    "Dataset",
    "DatasetUpdate",
    "DistflowError",
    "Elastic",
    "File",
    "FunctionJob",
    "Group",
    "GroupInfo",
    "Input",
    "Launcher",
    "LauncherOptions",
    "Notify",
    "Output",
    "Ranks",
    "Resources",
    "Results",
    "Retry",
    "Shared",
    "Spec",
    "Task",
    "TaskInfo",
    "Timeouts",
    "Topology",
    "WaitTimeout",
    "Workflow",
    "WorkflowEnded",
    "__version__",
    "get",
    "run",
    "submit",
]
# Without `list`, so that `from distflow import *` does not replace the built-in `list`.

__version__ = "0.2.0"

_OTHER_MODULES = (
    dict.fromkeys(("DistflowError", "WaitTimeout", "WorkflowEnded"), "errors")
    | dict.fromkeys(("GroupInfo", "TaskInfo", "Workflow", "get", "list", "submit"), "api.workflow")
    | dict.fromkeys(("FunctionJob", "Launcher", "Results", "run"), "api.functions")
)
"""The module of each public name that is not in ``api.spec``."""


def __dir__() -> tuple[str, ...]:
    """Return the names in this module, and all public names, including those that have not been imported yet."""
    return (*globals(), *__all__, "list")


def __getattr__(name: str) -> object:
    """Import a name's module when the name is first used (PEP 562)."""
    if name not in (*__all__, "list"):
        raise AttributeError(f"module 'distflow' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  keeps `import distflow` fast

    module = import_module(f"distflow.{_OTHER_MODULES.get(name, 'api.spec')}")
    found: object = getattr(module, "list_workflows" if name == "list" else name)
    globals()[name] = found
    return found
