"""The container of a task, and warnings about keys of a spec that have no effect."""

from __future__ import annotations

from pathlib import Path

from distflow.documents.requirements import Requirements
from distflow.plan.containers import container_notices, container_of, sharing_notices, venv_notices
from distflow.plan.model import Container
from distflow.spec.parse import load_spec_text
from distflow.structs import replace
from unit.supervisor.gangs import group_plan, node

LAUNCH = replace(
    group_plan().launches[0], image="repo/image:@@WORKFLOW_ID@@", mounts=("/data", "/a:/b", "/dev/shm"), privileged=True
)
SPEC = """
workflow:
  name: boxed
  tasks:
  - name: a
    image: first
    volumeMounts: [/data, /a:/b]
    command: [x]
  - name: b
    image: second
    privileged: true
    volumeMounts: [/data, /c:/c]
    command: [x]
"""


def fill(text: str) -> str:
    return text.replace("@@WORKFLOW_ID@@", "w-7")


def test_a_node_with_a_runtime_runs_the_image() -> None:
    found = container_of(LAUNCH, replace(node("n"), container="podman"), fill)
    assert found == Container(runtime="podman", image="repo/image:w-7", mounts=("/data:/data", "/a:/b"), privileged=True)


def test_without_a_runtime_or_an_image_there_is_no_container() -> None:
    assert container_of(LAUNCH, node("n"), fill) is None
    assert container_of(replace(LAUNCH, image=None), replace(node("n"), container="auto"), fill) is None


def test_an_ignored_key_is_reported_once() -> None:
    spec, problems = load_spec_text(SPEC, "spec.yaml", Path.cwd())
    assert problems == ()
    docker_node, plain_node = replace(node("n1"), container="docker"), node("n2")
    assert container_notices(spec, (docker_node,)) == ()
    found = [problem.as_text().partition("\n")[0] for problem in container_notices(spec, (docker_node, plain_node))]
    assert found == [
        "spec.yaml:6: warning: `image` is ignored on nodes with `container: none`: tasks run directly on the node",
        "spec.yaml:7: warning: `volumeMounts` is ignored on nodes with `container: none`: nothing is mounted at `/b`",
        "spec.yaml:9: warning: `privileged` is ignored on nodes with `container: none`: tasks run with the user's rights",
    ]


def test_the_warning_about_shared_paths_counts_the_paths_that_it_leaves_out() -> None:
    tasks = "".join(f"  - {{name: {name}, command: [ls, /tmp/a, /tmp/b, /var/tmp/c, /dev/shm/d]}}\n" for name in ("a", "b"))
    spec, problems = load_spec_text(f"workflow:\n  name: shared\n  tasks:\n{tasks}", "spec.yaml", Path.cwd())
    assert problems == ()
    (found,) = sharing_notices(spec, {}, {"a": "n", "b": "n"}, (node("n"),))
    assert found.message == (
        "`a`, `b` share `/dev/shm/d`, `/tmp/a`, `/tmp/b` and 1 more path if they run on one node; in OSMO each task has "
        "its own temporary directories"
    )


def test_the_warning_about_a_venv_says_whether_all_nodes_use_containers() -> None:
    spec = replace(load_spec_text(SPEC, "spec.yaml", Path.cwd())[0], venv=Requirements(file="r.txt", lines=("torch",)))
    docker_node, plain_node = replace(node("n1"), container="docker"), node("n2")
    assert venv_notices(spec, (plain_node,)) == ()
    (always,), (sometimes,) = venv_notices(spec, (docker_node,)), venv_notices(spec, (docker_node, plain_node))
    assert always.message == "`a` runs in a container and does not use the packages of `venv`"
    assert sometimes.message == "`a` does not use the packages of `venv` on nodes where it runs in a container"
