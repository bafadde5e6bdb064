"""Fill in the placeholders of a plan with the values of a binding: the leased nodes, addresses, ports and GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import PurePosixPath

from distflow.plan.compatibility import distributed_files
from distflow.plan.containers import container_of, venv_of
from distflow.plan.model import PLACEHOLDER, Binding, BoundLaunch, GroupPlan, PlannedGangLink
from distflow.pools.model import Node
from distflow.structs import replace

__all__ = ["bind", "bind_task"]


def bind(
    group: GroupPlan,
    binding: Binding,
    *,
    workflow_id: str,
    nodes: Mapping[str, Node],
) -> dict[str, BoundLaunch]:
    """Return every task of a group for its first attempt, with all placeholders filled in except ``@@ATTEMPT_DIR@@``.

    ``nodes`` are the pool's nodes by name. Variables of the plan override the ``environment`` of a node.
    """
    return {launch.task: bind_task(group, launch.task, binding, workflow_id, nodes) for launch in group.launches}


def bind_task(
    group: GroupPlan, task: str, binding: Binding, workflow_id: str, nodes: Mapping[str, Node], attempt: int = 0
) -> BoundLaunch:
    """Return one task of a group, like ``bind``. ``attempt`` is the number of its attempt, counted from 0."""
    launch, own = group.launch(task), binding.tasks[task]
    values = {
        "WORKFLOW_ID": workflow_id,
        "MASTER_ADDR": binding.tasks[group.master].address,
        "MASTER_PORT": "" if binding.port is None else str(binding.port),
        "IFNAME": own.interface,
        "GPU_IDS": ",".join(str(gpu) for gpu in own.gpu_ids),
        "NODE": own.node,
        "RETRY_ID": str(attempt),
        "LEASED_AT": datetime.fromtimestamp(int(binding.leased_at), timezone.utc).replace(tzinfo=None).isoformat(),
    }

    def value(match: re.Match[str]) -> str:
        name, argument = match.group(1), match.group(2)
        if name in ("ADDRESS", "NODE") and argument in binding.tasks:
            other = binding.tasks[argument]
            return other.address if name == "ADDRESS" else other.node
        return values.get(name, match.group(0)) if argument is None else match.group(0)

    def fill(text: str) -> str:
        return PLACEHOLDER.sub(value, text)

    node = nodes[own.node]
    environment = {**node.environment, **{name: fill(text) for name, text in launch.environment.items()}}
    if not own.interface:
        # No interface has the address itself, so torch and NCCL must choose one.
        environment = {name: text for name, text in environment.items() if not (name.endswith("_SOCKET_IFNAME") and not text)}
    container = container_of(launch, node, fill)
    # The node checks a container's mounts before it starts the container. If Slurm or Kubernetes has started the container, the
    # directories of the node may have other paths in it.
    is_inside = container is not None or (launch.image is not None and node.container == "engine")
    mounts = () if is_inside else tuple(fill(mount).partition(":")[0] for mount in launch.mounts)
    return BoundLaunch(
        task=task,
        node=own.node,
        argv=tuple(fill(word) for word in launch.argv),
        environment=environment,
        files=(
            *(replace(file, text=fill(file.text)) if file.text is not None else file for file in launch.files),
            *distributed_files(group, task, values, binding.tasks),
        ),
        setup=node.setup,
        # Programs expect the parent of a checkpoint's directory to exist: `/tmp` for `/tmp/models`.
        folders=(*launch.folders, *(str(PurePosixPath(one.place).parent) for one in launch.checkpoints)),
        venv=venv_of(group, launch, node),
        container=container,
        mounts=mounts,
        memory=launch.resource.memory if node.enforce_limits else None,
        python_path=launch.python_path,
        path=launch.path,
        gang=_link(group, task, binding),
        ranks=(launch.ranks.offset, launch.ranks.size) if launch.ranks is not None and launch.ranks.size > 1 else None,
        max_log=launch.max_log,
        output_link=launch.output_link,
    )


def _link(group: GroupPlan, task: str, binding: Binding) -> PlannedGangLink | None:
    if binding.link_port is None:
        return None
    launch, is_hub = group.launch(task), task == group.master
    return PlannedGangLink(
        task=task,
        others=tuple(one.task for one in group.launches if one.task != task) if is_hub else (group.master,),
        address=None if is_hub else binding.tasks[group.master].address,
        port=None if is_hub else binding.link_port,
        counts=group.counts(task),
        success=launch.exit_actions.complete,
        failure=launch.exit_actions.failures,
    )
