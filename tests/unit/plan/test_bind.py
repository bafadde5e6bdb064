"""A plan and a binding give the launches of the tasks."""

from __future__ import annotations

from distflow.plan.bind import bind, bind_task
from distflow.plan.model import Binding, PlannedFile, TaskBinding
from distflow.structs import replace
from unit.supervisor.gangs import group_plan, node

NODES = {
    "n1": node("n1"),
    "n2": replace(node("n2"), environment={"SITE": "west", "MASTER_ADDR": "nonsense"}, setup="module load cuda"),
}
BINDING = Binding(
    tasks={
        "t0": TaskBinding(node="n1", address="10.0.0.1", interface="eth0", gpu_ids=(0, 1)),
        "t1": TaskBinding(node="n2", address="10.0.0.2", interface="", gpu_ids=(4, 5)),
    },
    port=29512,
)


def test_every_placeholder_except_the_directory_is_replaced() -> None:
    plan = group_plan()
    launch = replace(
        plan.launches[1],
        argv=("run", "@@ADDRESS:t0@@:@@MASTER_PORT@@", "@@ATTEMPT_DIR@@/output"),
        environment={"MASTER_ADDR": "@@MASTER_ADDR@@", "CUDA_VISIBLE_DEVICES": "@@GPU_IDS@@", "ID": "@@WORKFLOW_ID@@"},
        files=(PlannedFile(path="files/a", shown="/a", text="to @@ADDRESS:t1@@ on @@NODE@@"),),
    )
    bound = bind(replace(plan, launches=(plan.launches[0], launch)), BINDING, workflow_id="w-7", nodes=NODES)["t1"]
    assert bound.argv == ("run", "10.0.0.1:29512", "@@ATTEMPT_DIR@@/output")
    assert bound.environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert bound.environment["ID"] == "w-7"
    assert bound.files[0].text == "to 10.0.0.2 on n2"
    assert bound.setup == "module load cuda"


def test_the_plan_overrides_the_nodes_environment() -> None:
    bound = bind(group_plan(), BINDING, workflow_id="w-7", nodes=NODES)["t1"]
    assert bound.environment["SITE"] == "west"
    assert bound.environment["MASTER_ADDR"] == "10.0.0.1"


def test_no_interface_is_set_if_the_interface_is_unknown() -> None:
    plan = group_plan()
    launches = tuple(replace(launch, environment={"NCCL_SOCKET_IFNAME": "@@IFNAME@@"}) for launch in plan.launches)
    bound = bind(replace(plan, launches=launches), BINDING, workflow_id="w-7", nodes=NODES)
    assert bound["t0"].environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in bound["t1"].environment


def test_each_attempt_gets_its_number() -> None:
    plan = group_plan()
    launch = replace(plan.launches[0], environment={"DISTFLOW_RETRY_ID": "@@RETRY_ID@@"})
    launches = [
        bind_task(replace(plan, launches=(launch, plan.launches[1])), "t0", BINDING, "w-7", NODES, attempt)
        for attempt in (0, 3)
    ]
    assert [bound.environment["DISTFLOW_RETRY_ID"] for bound in launches] == ["0", "3"]
