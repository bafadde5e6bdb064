"""Requests to the program on the Ray cluster whose answers are wrong or missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.backends.allocated.engine import Allocation, AllocationRequest, Over, RequestRefused
from distflow.backends.allocated.ray.program import ClusterProgram, RayMissing
from distflow.backends.allocated.ray.ray_engine import RayEngine
from distflow.errors import NodeUnreachable
from distflow.pools.model import Pool, RaySettings, ssh_node
from distflow.testing.waiting import wait_until
from distflow.transports.local import LocalTransport
from distflow.transports.multiplexed import MultiplexedTransport

READY = json.dumps({"answer": {"ray": "2.60.0", "python": "3.11.7"}})
MakePython = Callable[..., str]


@pytest.fixture
def python(tmp_path: Path) -> MakePython:
    """Make an interpreter that prints the lines instead of running its program.

    It then fails (``ends``), or copies its input to the file ``input``.
    """

    def make(*lines: str, ends: bool = False) -> str:
        (tmp_path / "input").touch()
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncat {tmp_path}/lines\n{'echo it failed >&2' if ends else f'exec cat >{tmp_path}/input'}\n")
        path.chmod(0o755)
        return str(path)

    return make


def program(python: str) -> ClusterProgram:
    return ClusterProgram(LocalTransport("head"), python=python, address="auto")


def engine(python: str) -> RayEngine:
    pool = Pool(name="r", backend="ray", nodes=(), template=ssh_node(), ray=RaySettings(python=python))
    return RayEngine(pool, LocalTransport("head"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "head: distflow cannot read Ray's answer"),
        ("[1]", "head: distflow cannot read Ray's answer"),
        ("[" * 100, "head: distflow cannot read Ray's answer"),
        (
            '{"kind": "failed", "error": "GcsError: \\u001b[31mgone\\nfor ever"}',
            "head: a request to Ray failed (`nodes`): GcsError:",
        ),
        ("{}", "head: a request to Ray failed (`nodes`): no reason"),
    ],
)
def test_a_wrong_answer_is_an_error_without_control_characters(python: MakePython, line: str, message: str) -> None:
    one = program(python(READY, line))
    with pytest.raises(NodeUnreachable) as caught:
        one.ask("nodes")
    one.close()
    assert message in str(caught.value)
    assert caught.value.message.isprintable()


def test_a_refused_request_raises_request_refused(python: MakePython) -> None:
    one = program(python(READY, '{"kind": "refused", "error": "ValueError: bundles must not be empty"}'))
    with pytest.raises(RequestRefused, match="bundles must not be empty"):
        one.ask("request")
    one.close()


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ((["not an answer"], False), NodeUnreachable, "cannot read Ray's answer"),
        (([], True), NodeUnreachable, "exited without an answer: it failed"),
        ((['{"kind": "no ray", "error": "No module named ray"}'], False), RayMissing, "its Python has no Ray"),
        ((['{"kind": "not connected", "error": "x"}'], False), NodeUnreachable, "cannot connect to Ray at `auto`: x"),
    ],
)
def test_a_program_that_does_not_start_reports_the_reason(
    python: MakePython, given: tuple[list[str], bool], kind: type[NodeUnreachable], message: str
) -> None:
    lines, ends = given
    one = program(python(*lines, ends=ends))
    for _ in range(2):  # the second request starts it again
        with pytest.raises(kind, match=message):
            one.ask("nodes")
    one.close()


def test_a_broken_connection_is_not_reported_as_an_exit_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nkill -KILL $PPID\n")  # ends the command hub, through which the program runs
    path.chmod(0o755)
    login = MultiplexedTransport(LocalTransport("head"))
    with pytest.raises(
        NodeUnreachable, match=r"head: the connection broke before Ray at `auto` answered: .*ended \(exit code 137\)"
    ):
        ClusterProgram(login, python=str(path), address="auto").ask("nodes")
    login.close()


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(NodeUnreachable, match="/no/python"):
        program("/no/python").ask("nodes")


@pytest.mark.parametrize(
    "answer", [1, None, [], {}, {"states": []}, {"states": {"abc": 1}, "nodes": []}, {"states": {"abc": {}}}]
)
def test_malformed_states_are_an_error(python: MakePython, answer: Any) -> None:
    one = engine(python(READY, json.dumps({"answer": answer})))
    with pytest.raises(NodeUnreachable, match="cannot read Ray"):
        one.states({"abc": ("a",)})
    one.close()


def test_other_malformed_answers_are_errors(python: MakePython) -> None:
    request = AllocationRequest(allocation=Allocation(workflow="u", group="g", attempt=0), label="w/g", nodes=())
    operations: tuple[Callable[[RayEngine], Any], ...] = (
        lambda one: one.request(request),
        lambda one: one.allocations(),
        lambda one: one.check(),
    )
    for ask in operations:
        one = engine(python(READY, '{"answer": 5}'))
        with pytest.raises(NodeUnreachable, match="cannot read Ray"):
            ask(one)
        one.close()


def test_connecting_to_a_node_of_an_ended_allocation_reports_its_end(python: MakePython) -> None:
    one = engine(python(READY, '{"answer": {"states": {"abc": null}, "nodes": []}}', '{"answer": null}'))
    with pytest.raises(NodeUnreachable) as caught:
        one.transport("abc", "gpu1_0").open(["true"])
    assert caught.value.message == ("gpu1_0@abc: Ray no longer knows placement group abc; its head may have been restarted")
    one.close()


def test_an_ended_allocation_is_released_again_after_a_failed_release(python: MakePython, tmp_path: Path) -> None:
    ended = '{"answer": {"states": {"abc": null}, "nodes": []}}'
    one = engine(python(READY, ended, '{"kind": "failed", "error": "gone"}', '{"answer": {}}'))
    with pytest.raises(NodeUnreachable, match="gone"):
        one.states({"abc": ("a",)})
    assert isinstance(one.states({"abc": ("a",)})["abc"], Over)
    one.states({"abc": ("a",)})  # sends no request: the program has no further answer
    wait_until(lambda: (tmp_path / "input").read_text().count('{"do": "release", "with": {"ids": ["abc"]}}') == 2, 20)
    one.close()


REFUSING_PROGRAM = """
from distflow.backends.allocated.ray import cluster_program

class Cluster:
    def __init__(self, address):
        pass

    def about(self):
        return {}

    def request(self):
        raise cluster_program.NotPossible("bundles must not be empty")

cluster_program.Cluster = Cluster
cluster_program.main("auto")
"""


def test_a_refusal_has_only_the_message_of_ray() -> None:
    child = subprocess.Popen([sys.executable, "-c", REFUSING_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write('{"do": "request", "with": {}}\n')
        child.stdin.flush()
        child.stdout.readline()
        assert json.loads(child.stdout.readline()) == {"kind": "refused", "error": "bundles must not be empty"}
