"""The meaning of Ray's reports: all states, and malformed reports."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from distflow.backends.allocated.engine import AllocationState, Granted, NodeRequest, Over, Queued, RequestRefused
from distflow.backends.allocated.ray.ray_engine import bundle_of
from distflow.backends.allocated.ray.states import (
    _OTHER_DEATHS,
    ACTOR_STATES,
    DEATHS,
    GROUP_STATES,
    SCHEDULING,
    Endpoint,
    hosts_of,
    parse_allocation,
)
from distflow.lifecycle.states import Reason
from distflow.pools.model import RayPlatform, RaySettings

gcs_pb2: Any = importlib.import_module("ray.core.generated.gcs_pb2")
common_pb2: Any = importlib.import_module("ray.core.generated.common_pb2")
NODES = [
    {
        "id": f"id{number}", "name": f"n{number}", "is_alive": True,
        "total": {"CPU": 8.0, "GPU": 2.0, "memory": 2.0**34}, "free": {"CPU": 6.0, "GPU": 0.0, "memory": 2.0**34},
    }
    for number in (1, 2)
]  # fmt: skip
ENDPOINT = {"address": "10.0.0.1", "port": 4242, "token": "ab" * 32}


def actor(index: int, state: str = "ALIVE", cause: Any = None, ended: float = 0, **changes: Any) -> dict[str, Any]:
    fields = {"name": f"distflow:u/g/0/{index}@abc", "index": index, "node": f"id{index + 1}", "endpoint": ENDPOINT}
    return fields | {"state": state, "cause": cause, "ended": ended} | changes


def group_report(state: str = "CREATED", scheduling: str = "FINISHED", actors: Any = None) -> dict[str, Any]:
    bundles = [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 2.0}]
    actors = [actor(0), actor(1)] if actors is None else actors
    return {"state": state, "scheduling": scheduling, "strategy": "STRICT_SPREAD", "bundles": bundles, "actors": actors}


def state_of(report: Any) -> AllocationState:
    return parse_allocation(report, NODES, ("master", "worker"), "abc")[0]


def death(reason: str = "", kind: str = "actor_died_error_context", node: str = "", message: str = "") -> dict[str, str]:
    return {"kind": kind, "reason": reason, "node": node, "message": message}


def test_all_states_and_reasons_of_ray_are_known() -> None:
    assert set(GROUP_STATES) == set(gcs_pb2.PlacementGroupTableData.PlacementGroupState.keys())
    assert set(SCHEDULING) == set(gcs_pb2.PlacementGroupStats.SchedulingState.keys())
    assert set(ACTOR_STATES) == set(gcs_pb2.ActorTableData.ActorState.keys())
    assert set(DEATHS) == set(common_pb2.ActorDiedErrorContext.Reason.keys())
    contexts = {field.name for field in common_pb2.ActorDeathCause.DESCRIPTOR.fields}
    assert contexts == {*_OTHER_DEATHS, "actor_died_error_context"}
    assert "AUTOSCALER_DRAIN_PREEMPTED" in set(common_pb2.NodeDeathInfo.Reason.keys())


def test_a_placement_group_is_granted_when_all_actors_answer() -> None:
    state, endpoints = parse_allocation(group_report(), NODES, ("master", "worker"), "abc")
    assert state == Granted(hosts={"master": "n1", "worker": "n2"})
    assert endpoints["n2"] == Endpoint(address="10.0.0.1", port=4242, token="ab" * 32)
    for actors in ([actor(0)], [actor(0), actor(1, endpoint=None)], [actor(0), actor(1, "PENDING_CREATION")]):
        assert isinstance(state_of(group_report(actors=actors)), Queued)


@pytest.mark.parametrize("group_state", [*GROUP_STATES, "SOMETHING_NEW"])
@pytest.mark.parametrize("actor_state", [*ACTOR_STATES, "SOMETHING_NEW"])
def test_every_state_has_a_meaning(group_state: str, actor_state: str) -> None:
    state = state_of(group_report(group_state, actors=[actor(0), actor(1, actor_state)]))
    if group_state == "REMOVED":
        assert isinstance(state, Over)
        assert (state.reason, state.tasks_may_have_ended) == (Reason.CANCELED, True)
    elif actor_state == "DEAD":
        assert isinstance(state, Over)
    else:
        assert isinstance(state, Granted if (group_state, actor_state) == ("CREATED", "ALIVE") else Queued)


@pytest.mark.parametrize("word", [*SCHEDULING, "SOMETHING_NEW"])
def test_the_reason_for_waiting_contains_the_resources(word: str) -> None:
    state = state_of(group_report("PENDING", word))
    assert isinstance(state, Queued)
    numbers = "requested with STRICT_SPREAD: 2 × 1 CPU, 2 GPU; free: n1 6 of 8 CPU, 0 of 2 GPU; n2 6 of 8 CPU, 0 of 2 GPU"
    assert state.why == f"{SCHEDULING.get(word, 'waits')} ({word}); {numbers}"


@pytest.mark.parametrize(
    ("cause", "reason", "text"),
    [
        (death("NODE_DIED"), Reason.NODE_LOST, "task worker on n2: its Ray node died"),
        (death("WORKER_DIED", message="a\nexit code 1"), Reason.NODE_LOST, "its actor's process ended (exit code 1)"),
        (death("RAY_KILL"), Reason.CANCELED, "was killed with `ray.kill`"),
        (death("NODE_DIED", node="AUTOSCALER_DRAIN_PREEMPTED"), Reason.PREEMPTED, "its Ray node was preempted"),
        (death(kind="oom_context"), Reason.OOM_KILLED, "out of memory"),
        (death("WORKER_DIED", message="because its placement group is removed"), Reason.CANCELED, "group abc was removed"),
        (death(kind="creation_task_failure_context", message="OSError: no"), Reason.START_ERROR, "could not start (OSError"),
        (death("SOMETHING_NEW"), Reason.NODE_LOST, "its actor ended"),
        (None, Reason.NODE_LOST, "its actor ended"),
    ],
)  # fmt: skip
def test_every_death_has_a_reason(cause: Any, reason: Reason, text: str) -> None:
    state = state_of(group_report(actors=[actor(0), actor(1, "DEAD", cause, 5)]))
    assert isinstance(state, Over)
    assert state.reason is reason
    assert text in state.message
    assert state.is_failure is (reason is Reason.START_ERROR)


def test_a_lost_node_explains_earlier_deaths_of_actors() -> None:
    actors = [actor(0, "DEAD", death("WORKER_DIED"), 5), actor(1, "DEAD", death("NODE_DIED"), 6)]
    state = state_of(group_report("RESCHEDULING", actors=actors))
    assert isinstance(state, Over)
    assert (state.reason, state.hosts) == (Reason.NODE_LOST, ("n2",))
    assert "task worker" in state.message


def test_the_hosts_on_a_lost_node_have_the_names_of_the_allocation() -> None:
    dead = {"cause": death("NODE_DIED"), "state": "DEAD", "ended": 5}
    state = parse_allocation(
        group_report(actors=[actor(0), actor(1, node="id1") | dead]), [NODES[0] | {"name": "n 1"}], ("master", "worker"), "abc"
    )[0]
    assert isinstance(state, Over)
    assert state.hosts == ("n-1", "n-1+2")


def test_an_unknown_placement_group_is_lost() -> None:
    state = state_of(None)
    assert isinstance(state, Over)
    assert state.reason is Reason.NODE_LOST


@pytest.mark.parametrize(
    "endpoint",
    [
        ENDPOINT | {"port": 0},
        ENDPOINT | {"port": "x"},
        ENDPOINT | {"address": "-oProxyCommand=x"},
        ENDPOINT | {"token": "?"},
        {},
    ],
)
def test_a_malformed_endpoint_is_an_error(endpoint: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        state_of(group_report(actors=[actor(0), actor(1, endpoint=endpoint)]))


def test_tasks_on_one_node_have_different_host_names() -> None:
    assert hosts_of(["n1", "n1", "10.0.0.2", "n1", "a b@c"]) == ["n1", "n1+2", "10.0.0.2", "n1+3", "a-b-c"]


def test_a_bundle_has_the_resources_of_task_and_platform() -> None:
    settings = RaySettings(platforms={"h100": RayPlatform(resources={"accelerator_type:H100": 0.001})})
    request = NodeRequest(task="a", gpus=2, memory=1 << 30, platform="h100")
    assert bundle_of("ray", settings, request) == {"CPU": 1, "GPU": 2, "memory": 1 << 30, "accelerator_type:H100": 0.001}
    assert bundle_of("ray", settings, NodeRequest(task="a", cpus=4)) == {"CPU": 4}
    with pytest.raises(RequestRefused, match="pool `ray` has no platform `h10`"):
        bundle_of("ray", settings, NodeRequest(task="a", platform="h10"))
