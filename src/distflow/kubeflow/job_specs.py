"""Turn the arguments of ``train`` into a spec: one gang with a task for each node."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.api.spec import File, Group, Ranks, Resources, Spec, Task, Timeouts
from distflow.kubeflow.backends import class_name
from distflow.kubeflow.functions import function_script
from distflow.kubeflow.options import ActiveDeadlineSeconds
from distflow.kubeflow.runtimes import RUNTIMES, Framework
from distflow.kubeflow.types import DEFAULT_PIP_INDEX_URL
from distflow.pools.model import Pool

__all__ = ["NODE", "JobOptions", "check_initializer", "job_spec", "read_options", "required_packages"]

NODE = "node"
"""The name of a job's task, as in Kubeflow."""
_SCRIPT = "train_function.py"
_TRAINERS = ("CustomTrainer", "CustomTrainerContainer", "BuiltinTrainer")
_RANKS_VARIABLE = "PET_NPROC_PER_NODE"
"""torchrun's variable for the number of ranks on a node."""
_RESOURCES = {"storage": "storage", "ephemeral-storage": "storage", "memory": "memory", "cpu": "cpu"}
_GPU = ("gpu", "nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of one call of ``train``."""

    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    deadline_s: int | None = None
    command: Sequence[str] = ()
    args: Sequence[str] = ()


def read_options(options: Sequence[object] | None) -> JobOptions:
    """Return the values of options, which are objects of distflow or of the package ``kubeflow``.

    Raises ``ValueError`` for an option that is not supported.
    """
    values: dict[str, Any] = {}
    for option in options or ():
        name = class_name(option, ["Name", "Labels", "ActiveDeadlineSeconds", "TrainerCommand", "TrainerArgs"])
        if name == "Name":
            values["name"] = str(vars(option)["name"])
        elif name == "Labels":
            values["labels"] = {**vars(option)["labels"]}
        elif name == "ActiveDeadlineSeconds":
            values["deadline_s"] = ActiveDeadlineSeconds(vars(option)["seconds"]).seconds
        elif name == "TrainerCommand":
            values["command"] = (*vars(option)["command"],)
        elif name == "TrainerArgs":
            values["args"] = (*vars(option)["args"],)
        else:
            raise ValueError(
                f"the option `{type(option).__name__}` is not supported. Supported options: Name, Labels, "
                "ActiveDeadlineSeconds, TrainerCommand, TrainerArgs"
            )
    return JobOptions(**values)


def check_initializer(initializer: object | None) -> None:
    """Raise ``ValueError`` if the initializer contains a dataset or a model."""
    if getattr(initializer, "dataset", None) is not None or getattr(initializer, "model", None) is not None:
        raise ValueError(
            "distflow does not run Kubeflow's initializers: fetch the data in the function, or write a spec with `inputs`, "
            "which distflow fetches before the ranks start (docs/data.md)"
        )


def job_spec(name: str, runtime: str, trainer: object | None, options: JobOptions, pool: Pool) -> Spec:
    """Return the spec of a job. Raises ``ValueError`` if the trainer is not valid or cannot run on the pool."""
    kind = class_name(trainer, _TRAINERS)
    if kind == "BuiltinTrainer":
        raise ValueError(
            "`BuiltinTrainer` (torchtune) is not supported: call torchtune, TRL or transformers in a function, and pass "
            "CustomTrainer(func=…)"
        )
    if kind is None:
        raise ValueError(f"`trainer` is `{trainer!r}`: pass CustomTrainer(func=…), or CustomTrainerContainer(image=…)")
    framework = RUNTIMES[runtime]
    environment = _environment(getattr(trainer, "env", None) or {})
    resources, gpus = _resources(getattr(trainer, "resources_per_node", None) or {}, pool)
    image = getattr(trainer, "image", None)
    is_container = kind == "CustomTrainerContainer"
    task = Task(
        name=NODE,
        image=None if image is None else _literal(image),
        **(_container_command(options, pool) if is_container else _function_command(trainer, options)),
        replicas=_nodes(getattr(trainer, "num_nodes", None)),
        ranks=Ranks(size=_ranks(environment, gpus, None if is_container else framework)),
        environment=environment,
    )
    group = Group(
        name="training",
        tasks=[task],
        launcher=None if is_container else framework.launcher,
        framework=None if is_container else framework.framework,
        timeout=Timeouts(exec_timeout=options.deadline_s) if options.deadline_s else None,
    )
    return Spec(name=name, groups=[group], resources={"default": resources})


def _function_command(trainer: object, options: JobOptions) -> dict[str, Any]:
    """Return the fields of a task that runs a function."""
    if options.command or options.args:
        raise ValueError("TrainerCommand and TrainerArgs need a CustomTrainerContainer: a CustomTrainer runs its function")
    arguments = vars(trainer)
    script = function_script(arguments["func"], arguments.get("func_args"))
    # Base64 keeps `{{` in the source from being rendered as a template. distflow still replaces tokens such as `{{output}}`.
    file = File(path=_SCRIPT, contents=base64.b64encode(script.encode()).decode(), base64=True)
    return {"command": ["python3", _SCRIPT], "files": [file]}


def _container_command(options: JobOptions, pool: Pool) -> dict[str, Any]:
    """Return the fields of a task that runs a command in an image."""
    if not options.command:
        raise ValueError(
            "CustomTrainerContainer needs the option TrainerCommand(command=[…]): distflow does not run the image's entry point"
        )
    if any(node.container == "none" for node in pool.node_settings):
        raise ValueError(
            f"the pool `{pool.name}` has nodes that do not run containers: set `container: auto` for the pool, and for nodes "
            "with `container: none` (docs/containers.md), or pass CustomTrainer(func=…)"
        )
    return {"command": [_literal(word) for word in options.command], "args": [_literal(word) for word in options.args]}


def required_packages(runtime: str, trainer: object | None) -> list[str]:
    """Return the lines of a requirements file for a job; an empty list if it uses the packages of the nodes.

    An environment from these lines does not contain the packages of the nodes. So the package of the runtime's framework is
    added if it is not listed.
    """
    packages = [str(one) for one in getattr(trainer, "packages_to_install", None) or ()]
    if not packages:
        return []
    own = RUNTIMES[runtime].package
    named = {re.split(r"[^A-Za-z0-9_.-]", one, maxsplit=1)[0].lower() for one in packages}
    urls = [*(getattr(trainer, "pip_index_urls", None) or ())]
    options = [] if urls[:1] in ([], [DEFAULT_PIP_INDEX_URL]) else [f"--index-url {urls[0]}"]
    options += [f"--extra-index-url {url}" for url in urls[1:]]
    return [*options, *([own] if own is not None and own not in named else []), *packages]


def _literal(text: object) -> str:
    """Escape templates (``{{``, ``{%``, ``{#``) and references to variables (``$(NAME)``), so that a task gets the text.

    Tokens such as ``{{output}}`` are still replaced.
    """
    return re.sub(r"\$(?=\$*\()", "$$", re.sub(r"\{[{%#]", r"{% raw %}\g<0>{% endraw %}", str(text)))


def _environment(variables: Mapping[str, object]) -> dict[str, Any]:
    return {name: _literal(value) for name, value in variables.items()}


def _nodes(number: object) -> int:
    if number is None:
        return 1
    if type(number) is not int or number < 1:
        raise ValueError(f"num_nodes is {number!r}: it must be a whole number, 1 or more")
    return number


def _ranks(environment: Mapping[str, str], gpus: int, framework: Framework | None) -> int:
    """Return the number of ranks on each node."""
    number = environment.get(_RANKS_VARIABLE, "")
    if number.isascii() and number.isdigit() and int(number):
        return int(number)
    return 1 if framework is not None and framework.has_one_rank else max(gpus, 1)


def _resources(requested: Mapping[str, object], pool: Pool) -> tuple[Resources, int]:
    """Return the resources that a job reserves on each node, and the number of GPUs among them.

    In the pool of this machine, where all ranks share one node, only GPUs are reserved.
    """
    found: dict[str, Any] = {}
    for key, value in requested.items():
        name = key.lower()
        if name in _GPU:
            found["gpu"] = _count(key, value)
        elif name not in _RESOURCES:
            raise ValueError(f"resources_per_node: distflow does not know `{key}`: use `gpu`, `cpu`, `memory` and `storage`")
        elif not pool.shares_nodes:
            found[_RESOURCES[name]] = math.ceil(_quantity(key, value)) if name == "cpu" else value
    return Resources(**found), found.get("gpu", 0)


def _count(key: str, value: object) -> int:
    number = _quantity(key, value, "a whole number, such as 4")
    if number != int(number):
        raise ValueError(f"resources_per_node: `{key}` is {value!r}: the number of GPUs must be a whole number, such as 4")
    return int(number)


def _quantity(key: str, value: object, valid: str = "4, 0.5 or `500m`") -> float:
    """Return the value of a Kubernetes quantity: ``4``, ``"4"``, ``0.5`` or ``"500m"``. ``valid`` is for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", str(value))
    if match is None:
        raise ValueError(f"resources_per_node: `{key}` is {value!r}, which is not a valid quantity: write {valid}")
    return float(match[1]) / (1000 if match[2] else 1)
