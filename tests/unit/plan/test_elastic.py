"""Elastic groups, which may run in several sizes: each size is checked and has a complete plan."""

from __future__ import annotations

from pathlib import Path

from distflow.client.specs import propose_placement
from distflow.documents.problems import Severity
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.drawing import draw_world
from distflow.plan.bind import bind
from distflow.plan.compile import compile_plan
from distflow.plan.model import Binding, Plan, TaskBinding
from distflow.spec.model import WorkflowSpec
from distflow.spec.parse import load_spec_text
from unit.supervisor.gangs import node, pool

SPEC = """
workflow:
  name: gang
  resources: {default: {gpu: 2}}
  groups:
  - name: train
    elastic: {min: 2, wait: 5m}
    tasks:
    - {name: watcher, command: [sleep, '1']}
    - name: master
      lead: true
      ranks: {size: 2}
      launcher: torchrun
      command: [python3, train.py, --ranks, '{{world_size}}']
    - name: worker
      launcher: torchrun
      replicas: 3
      ranks: {size: 2}
      command: [python3, train.py, --nodes, '{{num_nodes}}']
"""


def _compiled(text: str = SPEC) -> tuple[WorkflowSpec, Plan]:
    spec, _ = load_spec_text(text, "spec.yaml", Path.cwd())
    worlds, problems = check_layout(spec)
    assert problems == ()
    return spec, compile_plan(spec, worlds, pool="lab", bundles={})


def test_every_size_has_its_own_plan() -> None:
    (group,) = _compiled()[1].groups
    assert [[one.task for one in size.launches] for size in group.smaller] == [
        ["watcher", "master", "worker-0", "worker-1"],
        ["watcher", "master", "worker-0"],
    ]
    assert group.smaller_after_s == 300.0
    assert group.sized(5) is group
    smaller_group = group.sized(4)
    assert smaller_group.world is not None
    assert (smaller_group.world.world_size, smaller_group.master, smaller_group.lead.task) == (6, "master", "master")
    for size, ranks in ((group, "8"), (smaller_group, "6"), (group.sized(3), "4")):
        assert size.launch("master").argv[-2:] == ("--ranks", ranks)
        environment = size.launch("master").environment
        assert environment["DISTFLOW_WORLD_SIZE"] == ranks
        assert environment["NNODES"] == environment["PET_NNODES"] == str(int(ranks) // 2)
        assert size.launch("worker-0").argv[-2:] == ("--nodes", str(int(ranks) // 2))
        # The ranks of a task do not depend on the number of tasks.
        assert size.launch("worker-0").ranks == group.launch("worker-0").ranks


def test_an_attempt_gets_only_the_tasks_that_run() -> None:
    group = _compiled()[1].groups[0].sized(3)
    tasks = {one.task: TaskBinding(node=one.task, address=f"10.0.0.{at}") for at, one in enumerate(group.launches)}
    binding = Binding(tasks=tasks, port=29500, link_port=29501, leased_at=0.0)
    launches = bind(group, binding, workflow_id="gang-1", nodes={name: node(name) for name in tasks})
    link = launches["master"].gang
    assert link is not None
    assert link.others == ("watcher", "worker-0")
    members = next(file.text for file in launches["master"].files if file.path.endswith("distributed.json"))
    assert members is not None
    assert '"required_count": 3' in members
    assert "worker-1" not in members


def test_the_drawing_marks_tasks_that_may_be_left_out() -> None:
    world = _compiled()[1].groups[0].world
    assert world is not None
    noted = [line.split()[0] for line in draw_world(world).splitlines() if line.endswith("may be left out")]
    assert noted == ["worker-1", "worker-2"]


def test_a_pool_with_room_for_the_smallest_size_is_enough() -> None:
    spec, plan = _compiled()
    small = pool(node("n0", gpus=4), node("n1"))
    placement, problems = propose_placement(plan, small, spec, Severity.ERROR)
    assert (sorted(placement), problems) == (["master", "watcher", "worker-0"], ())
    placement, problems = propose_placement(plan, pool(node("n0")), spec)
    assert [problem.message for problem in problems] == ["group `train` can never run in pool `lab`"]
    assert "worker-0: n0: used by master of the same world" in problems[0].hint
