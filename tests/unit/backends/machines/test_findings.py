"""Findings from measurements: each rule with and without a finding, and the summary."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Literal

import pytest

from distflow.backends.machines.checks.findings import Finding, Grade, folded, judge_node, judge_nodes, judge_torch
from distflow.backends.machines.checks.measured import (
    PYTHON_PROBE,
    Gpu,
    GpuApp,
    NodeMeasurements,
    Pair,
    Torch,
    parse_python,
    python_trouble,
)
from distflow.backends.machines.checks.network import AllReduce, judge_pairs, verdict
from distflow.backends.machines.checks.torch_search import why_no_torch
from distflow.documents.requirements import Requirements
from distflow.errors import BootstrapFailed, HostKeyMismatch, NodeUnreachable
from distflow.lifecycle.clocks import Clock
from distflow.pools.model import Node
from distflow.structs import replace
from outputs import assert_documented

GIB = 1 << 30


def gpu(index: int) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name="H100", driver="550.54", memory_mib=81559, used_mib=1)


def probe(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "root": {
            "path": "/r", "file_system": "ext4", "is_noexec": False, "error": None,
            "free_bytes": 50 * GIB, "total_bytes": 100 * GIB,
        },
        "leases": {"path": "/tmp/distflow-leases", "file_system": "ext4", "error": None},
        "names": {"hostname": "gpu1", "addresses": ["10.0.0.1"], "error": None},
        "gpu_owners": {},
        "logind": {"in_session": True, "properties": ["b false", 'as 1 "root"', "as 0", ""]},
    }  # fmt: skip
    return {name: {**value, **changes.get(name, {})} for name, value in good.items()}


def node(name: str = "gpu1", *, gpus: int | None = None, **fields: Any) -> NodeMeasurements:
    """A healthy node, with the given fields changed."""
    given: dict[str, Any] = {
        "address": f"10.0.0.{name[-1]}",
        "interface": "eth0",
        "facts": {"user": "ubuntu", "addresses": [{"address": "10.0.0.1", "interface": "eth0"}]},
        "probe": probe(),
        "torch": Torch(python="3.12.3", executable="/v/python", version="2.6.0", cuda="12.4", is_available=True, devices=8),
        "clock": Clock(offset_s=0.001, uncertainty_s=0.001),
        **fields,
    }
    return NodeMeasurements(node=Node(name=name, host=name, root="~/.distflow", python="/v/python", gpus=gpus), **given)


def findings_of(measured: NodeMeasurements) -> list[tuple[str, str, str]]:
    return [(finding.grade.value, finding.about, finding.message) for finding in judge_node(measured)]


def only_finding(measured: NodeMeasurements) -> Finding:
    (finding,) = judge_node(measured)
    return finding


def test_a_healthy_node_has_no_findings() -> None:
    assert findings_of(node()) == []
    assert findings_of(replace(node(gpus=8), gpus=tuple(map(gpu, range(8))))) == []
    assert list(judge_nodes([node("gpu1"), node("gpu2")])) == []


def test_an_ssh_error_keeps_its_message_and_remedy() -> None:
    finding = only_finding(node(error=HostKeyMismatch("gpu1", "its key has changed", hint="ssh-keygen -R gpu1")))
    assert (finding.grade, finding.about, finding.message, finding.hint) == (
        Grade.ERROR, "ssh", "its key has changed", "ssh-keygen -R gpu1",
    )  # fmt: skip


@pytest.mark.parametrize(
    "about",
    ["root", "python"],
)
def test_a_bootstrap_error_is_about_the_root_or_python(about: Literal["root", "python"]) -> None:
    finding = only_finding(node(error=BootstrapFailed("gpu1", "it does not", hint="do this", about=about)))
    assert (finding.grade, finding.about, finding.message, finding.hint) == (Grade.ERROR, about, "it does not", "do this")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"root": {"error": "Read-only file system"}}, ("error", "root", "its root /r is not writable: Read-only")),
        (
            {"root": {"is_noexec": True}},
            ("warning", "root", "its root /r is on a file system that does not allow execution (noexec)"),
        ),
        ({"root": {"file_system": "nfs4"}}, ("note", "root", "its root /r is on a network file system (nfs4)")),
        ({"root": {"free_bytes": GIB - 1, "total_bytes": 10 * GIB}}, ("warning", "disk", "only 1024 MiB of 10 GiB are free")),
        ({"root": {"free_bytes": 40 * GIB, "total_bytes": 1000 * GIB}}, ("warning", "disk", "only 40 GiB of 1000 GiB")),
        ({"leases": {"error": "the lease directory /l cannot be used: X"}}, ("error", "leases", "the lease directory /l")),
        (
            {"leases": {"file_system": "lustre"}},
            ("warning", "leases", "its lease directory /tmp/distflow-leases is on a"),
        ),
        ({"leases": {"owner": "eve"}}, ("warning", "leases", "its lease directory /tmp/distflow-leases belongs to eve")),
        ({"names": {"addresses": ["127.0.1.1"]}}, ("note", "name", "its own name gpu1 resolves to 127.0.1.1")),
        ({"logind": {"properties": ["b true", 'as 1 "root"', "as 0"]}}, ("warning", "login", "systemd kills all processes")),
    ],
)
def test_each_problem_is_one_finding(changes: dict[str, Any], expected: tuple[str, str, str]) -> None:
    ((grade, about, message),) = findings_of(node(probe=probe(**changes)))
    assert (grade, about) == expected[:2]
    assert message.startswith(expected[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"names": {"addresses": ["127.0.1.1", "10.0.0.1"]}},
        {"names": {"addresses": [], "error": "Name or service not known"}},
        {"logind": {"in_session": False, "properties": ["b true", "as 0", "as 0"]}},
        {"logind": {"properties": ["b true", 'as 2 "root" "ubuntu"', "as 0"]}},
        {"logind": {"properties": ["b true", "as 0", 'as 1 "other"']}},
        {"logind": {"properties": []}},
        {"root": {"free_bytes": 6 * GIB, "total_bytes": 100 * GIB}},
    ],
)
def test_harmless_settings_have_no_findings(changes: dict[str, Any]) -> None:
    assert findings_of(node(probe=probe(**changes))) == []


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        (None, None, None),
        (0, None, None),
        (8, None, ("error", "the configuration says 8 GPUs, and the node reports 0: it has no nvidia-smi")),
        (8, 8, None),
        (None, 8, None),
        (8, 7, ("error", "the configuration says 8 GPUs, and the node reports 7")),
        (1, 0, ("error", "the configuration says 1 GPU, and the node reports 0")),
        (4, 8, ("note", "the configuration allows 4 of its 8 GPUs")),
    ],
)
def test_gpus_are_compared_with_the_configuration(
    wanted: int | None, found: int | None, expected: tuple[str, str] | None
) -> None:
    torch = Torch(python="3.12.3", executable="/v/python", version="2.6.0", is_available=True, devices=found or 0)
    measured = replace(node(gpus=wanted, torch=torch), gpus=None if found is None else tuple(map(gpu, range(found))))
    gpus = [(grade, message) for grade, about, message in findings_of(measured) if about == "gpus"]
    assert len(gpus) == (expected is not None)
    if expected is not None:
        assert gpus[0][0] == expected[0]
        assert gpus[0][1].startswith(expected[1])


def test_a_failing_nvidia_smi_is_quoted() -> None:
    finding = only_finding(node(gpus=8, gpu_error="NVIDIA-SMI has failed because it couldn't communicate with the driver"))
    assert finding.message.startswith("`nvidia-smi` fails: NVIDIA-SMI has failed")


def test_foreign_gpu_processes_are_a_warning_and_distflow_processes_a_note() -> None:
    apps = [GpuApp(gpu_uuid=f"GPU-{i}", pid=100 + i, name="python", used_mib=512) for i in range(3)]
    owners = {"100": {"user": "ada", "attempt": None}, "101": {"user": "me", "attempt": "u/g/t/0"}}
    measured = replace(
        node(torch=None), gpus=tuple(map(gpu, range(3))), apps=tuple(apps), probe={**probe(), "gpu_owners": owners}
    )
    others, ours = judge_node(measured)
    assert others.grade is Grade.WARNING
    assert others.hint.splitlines()[:2] == ["GPU 0: pid 100 of ada (python, 512 MiB)", "GPU 2: pid 102 (python, 512 MiB)"]
    assert (ours.grade, ours.message) == (Grade.NOTE, "1 process of distflow workflows on its GPUs")
    shared, _ = judge_node(replace(measured, node=replace(measured.node, share_gpus=True)))
    assert "these GPUs are not leased" in others.hint
    assert "not leased" not in shared.hint


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ({"version": None, "error": "OSError('x')"}, ("warning", "torch cannot be imported: OSError('x')")),
        ({"error": "AttributeError('x')"}, ("warning", "torch 2.6.0 can be imported, but not queried: AttributeError('x')")),
        (
            {"python": "", "error": "sh: module: not found"},
            ("warning", "its `python` (/v/python) does not answer in the environment of tasks"),
        ),
        ({"cuda": None, "is_available": False}, ("warning", "torch 2.6.0 (built without CUDA) sees none of its GPUs")),
        ({"is_available": False}, ("warning", "torch 2.6.0 (built for CUDA 12.4) sees none of its GPUs")),
        ({"devices": 1}, ("warning", "torch sees 1 of its 2 GPUs")),
    ],
)
def test_problems_of_torch_are_warnings(torch: dict[str, Any], expected: tuple[str, str]) -> None:
    good = node().torch
    assert good is not None
    ((grade, _, message),) = findings_of(replace(node(torch=replace(good, **torch)), gpus=(gpu(0), gpu(1))))
    assert grade == expected[0]
    assert message.startswith(expected[1])


def test_the_finding_about_a_foreign_address_lists_the_own_addresses() -> None:
    facts = {
        "addresses": [
            {"address": "127.0.0.1", "interface": "lo"}, {"address": "::1", "interface": "lo"},
            {"address": "fe80::1", "interface": "eth0"}, {"address": "10.0.0.1", "interface": "eth0"},
        ]
    }  # fmt: skip
    finding = only_finding(node(address="203.0.113.7", is_address_own=False, facts=facts))
    assert (finding.grade, finding.about) == (Grade.WARNING, "address")
    assert finding.hint == "set `address` to the one that the other nodes reach: 10.0.0.1 (eth0)"
    assert only_finding(node(listen_error="cannot listen on x")).grade is Grade.ERROR


# -- comparisons of nodes


def test_a_wrong_clock_is_reported_but_not_an_uncertain_one() -> None:
    right, wrong = node("gpu1"), node("gpu2", clock=Clock(offset_s=-3.2, uncertainty_s=0.1))
    (finding,) = judge_nodes([right, wrong])
    assert (finding.nodes, finding.message) == (("gpu2",), "its clock is 3.2 s behind this machine's")
    assert list(judge_nodes([right, node("gpu2", clock=Clock(offset_s=2.0, uncertainty_s=1.5))])) == []


def test_equal_offsets_of_all_clocks_blame_the_clock_of_this_machine() -> None:
    nodes = [node(f"gpu{i}", clock=Clock(offset_s=60 + i / 10, uncertainty_s=0.1)) for i in (1, 2)]
    (finding,) = judge_nodes(nodes)
    assert finding.message == "their clocks agree with each other, and are 60.1 s ahead of this machine's"
    assert "this machine's clock" in finding.hint


def test_different_versions_are_reported_once() -> None:
    older = Torch(python="3.10.12", executable="/v/python", version="2.5.1")
    without = Torch(python="3.12.4", executable="/v/python")
    nodes = [node("gpu1"), node("gpu2", torch=older), node("gpu3"), node("gpu4", torch=without)]
    python, torch = judge_nodes(nodes)
    assert python.message == "Python differs: 3.12 on gpu1, gpu3, gpu4; 3.10 on gpu2"
    assert torch.message == "torch differs: 2.6.0 on gpu1, gpu3; 2.5.1 on gpu2"
    (missing,) = judge_torch(nodes)
    assert (missing.grade, missing.nodes) == (Grade.WARNING, ("gpu4",))
    assert missing.message == "torch is not installed for /v/python; nodes with torch: gpu1, gpu2, gpu3"


def test_without_torch_on_any_node_its_absence_is_a_note() -> None:
    nodes = [node(name, torch=Torch(python="3.12.4", executable="/v/python")) for name in ("gpu1", "gpu2")]
    (note,) = folded(judge_torch(nodes))
    assert (note.grade, note.nodes, note.message) == (Grade.NOTE, ("gpu1", "gpu2"), "torch is not installed for /v/python")


def test_missing_torch_is_an_error_where_it_is_needed_and_the_remedy_names_a_python_with_torch() -> None:
    torch = Torch(python="3.12.4", executable="/v/python", others=("/opt/venv/bin/python", "/opt/b/bin/python"))
    found = verdict([node("gpu1", torch=torch)], [], torch_nodes=["gpu1"])
    (error,) = found.findings
    assert (error.grade, error.message) == (Grade.ERROR, "torch is not installed for /v/python")
    assert error.hint.startswith(
        "/opt/venv/bin/python has it: add `--python /opt/venv/bin/python`, `python=/opt/venv/bin/python`"
    )
    assert (found.can_run, found.text) == (False, "nothing can run on this node: gpu1 cannot take part")


@pytest.mark.parametrize(
    ("lacks", "tools", "found"),
    [
        (False, {"uv": None, "pip": False}, []),
        (True, {"uv": "/bin/uv", "pip": False}, [("note", "venv", "the Python environment of r.txt is not built yet")]),
        (True, {"uv": None, "pip": True}, [("note", "venv", "the Python environment of r.txt is not built yet")]),
        (
            True,
            {"uv": None, "pip": False},
            [("error", "venv", "it cannot build a Python environment: it has no uv, and its Python has no `ensurepip`")],
        ),
    ],
)
def test_a_node_that_cannot_build_its_python_environment_is_reported(
    lacks: bool, tools: dict[str, Any], found: list[tuple[str, str, str]]
) -> None:
    venv = Requirements(file="r.txt", lines=("torch",))
    measured = node(probe={**probe(), "venv_tools": tools}, venv=venv, lacks_venv=lacks)
    assert findings_of(measured) == found
    assert findings_of(replace(measured, venv=None)) == []


def test_the_remedy_for_a_venv_without_torch_is_its_requirements_file() -> None:
    torch = Torch(python="3.12.4", executable="/r/venvs/1/env/bin/python", others=("/opt/venv/bin/python",))
    (missing,) = judge_torch([node(torch=torch, venv=Requirements(file="r.txt", lines=("numpy",)))])
    assert missing.hint == "add `torch` to r.txt"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"executable": "/v/python", "lacks": ""}, ""),
        ({"executable": "/v/python", "lacks": "none"}, "torch is not installed for /v/python; install it, or name the Python"),
        (
            {"executable": "/v/python", "lacks": "old", "others": ["/a\x1b[2J", 7, "/b/bin/python"]},
            "torch has no torchrun (it is older than 1.9, or another package) for /v/python; /b/bin/python has it: add",
        ),
        ({"lacks": "hostile"}, ""),
        ([], ""),
    ],
)
def test_torch_is_missing_only_after_a_valid_answer(answer: Any, why: str) -> None:
    reason = why_no_torch({"stdout": f"from the setup\n@@distflow-torch {json.dumps(answer)}\n"})
    assert reason.startswith(why)
    assert bool(reason) is bool(why)
    assert why_no_torch({"stdout": "sh: python3: not found"}) == ""


@pytest.mark.parametrize(("lacks", "remedy"), [("none", "add `torch`"), ("old", "require `torch>=1.9`")])
def test_the_remedy_for_torchrun_in_a_venv_depends_on_whether_it_has_torch(lacks: str, remedy: str) -> None:
    answer = {"executable": "/v/python", "lacks": lacks}
    reason = why_no_torch({"stdout": f"@@distflow-torch {json.dumps(answer)}\n"}, in_venv=True)
    assert f"; {remedy} " in reason


def test_two_names_of_one_machine_are_a_note() -> None:
    nodes = [node(name, facts={"boot_id": boot}) for name, boot in (("gpu1", "a"), ("gpu2", "b"), ("gpu3", "a"), ("gpu4", ""))]
    (note,) = judge_nodes([*nodes, node("gpu5")])
    assert (note.grade, note.nodes) == (Grade.NOTE, ("gpu1", "gpu3"))
    assert "the same machine" in note.message


def test_gpus_are_counted_by_their_devices_without_nvidia_smi() -> None:
    assert findings_of(node(gpus=8, facts={"gpus": 8})) == []
    assert findings_of(node(gpus=8, facts={"gpus": 7}))[0][0] == "error"


def test_check_capacity_false_skips_the_check_of_gpus() -> None:
    one = node(gpus=8, facts={"gpus": 0})
    assert findings_of(replace(one, node=replace(one.node, check_capacity=False))) == []


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ({"cpus": 64}, [("error", "cpus", "the configuration says 64 CPUs, and the node reports 32")]),
        (
            {"memory": 200 * GIB},
            [("error", "memory", "the configuration says 200 GiB of memory, and the node reports 62 GiB")],
        ),
        ({"cpus": 32, "memory": 64 * GIB}, []),
        ({"cpus": 64, "memory": 200 * GIB, "check_capacity": False}, []),
        ({}, []),
    ],
)
def test_fewer_cpus_or_less_memory_than_configured_is_an_error(
    configured: dict[str, int], expected: list[tuple[str, str, str]]
) -> None:
    one = node("gpu1", facts={"cpus": 32, "memory": 62 * GIB})
    measured = replace(one, node=replace(one.node, **configured))  # type: ignore[arg-type]
    assert findings_of(measured) == expected
    assert verdict([measured], []).can_run is (not expected)


@pytest.mark.parametrize(("gpus", "grade"), [(8, Grade.ERROR), (0, Grade.WARNING)])
def test_nodes_that_share_a_lease_directory_are_named(gpus: int, grade: Grade) -> None:
    facts = {"gpus": gpus, "machine": "machine a b 1 2", "boot_id": "b"}
    nodes = [node("gpu1", facts=facts), node("gpu2", facts=facts | {"machine": "machine c d 1 2", "boot_id": "d"})]
    assert list(judge_nodes(nodes)) == []
    (found,) = judge_nodes([*nodes, node("gpu3", facts=facts)])
    assert (found.grade, found.nodes) == (grade, ("gpu1", "gpu3"))
    assert "they are the same machine, with the same lease directory" in found.message
    all_of_them = verdict([*nodes, node("gpu3", facts=facts)], [])
    assert all_of_them.can_run is (not gpus)
    if gpus:
        assert all_of_them.text == "a gang cannot run on all 3 nodes: gpu1, gpu3 are the same machine, or share leases"
    # Machines that share a lease directory over the network are different machines, whose leases collide.
    apart = [node(name, facts=facts | {"boot_id": name, "machine": "network nas:/x 7"}) for name in ("gpu1", "gpu2")]
    (found,) = judge_nodes(apart)
    assert (found.grade, found.nodes) == (grade, ("gpu1", "gpu2"))
    assert "they share the lease directory" in found.message


def test_equal_findings_about_nodes_are_merged() -> None:
    notes = [Finding(grade=Grade.NOTE, about="name", nodes=(f"gpu{i}",), message="m", hint="h") for i in range(3)]
    error = Finding(grade=Grade.ERROR, about="ssh", nodes=("gpu9",), message="e")
    first, second = folded([*notes, error])
    assert first is error
    assert second.nodes == ("gpu0", "gpu1", "gpu2")
    assert second.as_text() == "note: gpu0, gpu1, gpu2: m\n    h"


# -- connections between nodes


def tried_pairs(count: int, **failed: str) -> list[Pair]:
    """All pairs of gpu1 … gpuN; ``g1_g2="timeout"`` sets the result of gpu1 → gpu2."""
    names = [f"gpu{i}" for i in range(1, count + 1)]
    return [
        Pair(source=a, target=b, address=f"10.0.0.{b[-1]}", kind=failed.get(f"g{a[-1]}_g{b[-1]}", "ok"))
        for a in names
        for b in names
        if a != b
    ]


def connection_findings(count: int, **failed: str) -> list[tuple[tuple[str, ...], str]]:
    nodes = [node(f"gpu{i}") for i in range(1, count + 1)]
    return [(finding.nodes, finding.message) for finding in judge_pairs(nodes, tried_pairs(count, **failed))]


def test_complete_connectivity_has_no_findings() -> None:
    assert connection_findings(4) == []


def test_a_failed_connection_names_both_nodes() -> None:
    assert connection_findings(3, g1_g2="refused") == [(("gpu2",), "gpu1 cannot reach it at 10.0.0.2: connection refused")]
    assert connection_findings(2, g1_g2="no_route") == [(("gpu2",), "gpu1 cannot reach it at 10.0.0.2: no route to host")]


def test_a_disconnected_node_has_two_findings_instead_of_six() -> None:
    failed = {f"g{i}_g4": "timeout" for i in (1, 2, 3)} | {f"g4_g{i}": "timeout" for i in (1, 2, 3)}
    assert connection_findings(4, **failed) == [
        (("gpu4",), "it reaches none of the other nodes: no answer"),
        (("gpu4",), "no other node reaches it at 10.0.0.4: no answer"),
    ]


@pytest.mark.parametrize("kind", ["refused", "timeout", "no_route", "no_name", "stranger"])
def test_every_kind_of_failure_has_a_message_and_a_remedy(kind: str) -> None:
    (finding,) = judge_pairs([node("gpu1"), node("gpu2")], tried_pairs(2, g1_g2=kind))
    assert finding.grade is Grade.ERROR
    assert kind not in finding.message.split(": ")[1] or kind == "refused"
    assert "address" in finding.hint


def test_nodes_with_the_same_address_must_get_their_own() -> None:
    nodes = [node(name, address="127.0.0.1") for name in ("gpu1", "gpu2")]
    pairs = [Pair(source="gpu1", target="gpu2", address="127.0.0.1", kind="refused")]
    pairs += [Pair(source="gpu2", target="gpu1", address="127.0.0.1", kind="stranger")]
    (finding,) = judge_pairs(nodes, pairs)
    assert (finding.nodes, finding.message) == (("gpu1", "gpu2"), "these nodes have the same training address 127.0.0.1")
    assert finding.hint.startswith("127.0.0.1 is the same on every machine")


def test_the_summary_names_what_prevents_a_gang() -> None:
    good = [node("gpu1"), node("gpu2"), node("gpu3")]
    assert verdict(good[:1], []).text == "1 node can run a gang"
    assert (verdict(good, tried_pairs(3)).text, verdict(good, tried_pairs(3)).can_run) == ("3 nodes can run a gang", True)
    without = [node(name, torch=Torch(python="3.12.4", executable="/v/python")) for name in ("gpu1", "gpu2")]
    assert verdict(without, []).can_run
    assert verdict(without, []).text.startswith(
        "2 nodes can run a gang, but without torch, which torchrun and distflow.train need"
    )
    assert verdict([*without, good[2]], []).text == "3 nodes can run a gang"
    lost = node("gpu3", error=NodeUnreachable("gpu3", "gone"))
    assert verdict([*good[:2], lost], []).text == "a gang cannot run on all 3 nodes: gpu3 cannot take part"
    both = verdict([*good[:2], lost], tried_pairs(2, g1_g2="timeout"))
    assert both.text == "a gang cannot run on all 3 nodes: gpu3 cannot take part, and gpu1, gpu2 do not all reach each other"
    assert verdict([good[0], lost], []).text == "a gang cannot run on both nodes: gpu3 cannot take part"
    assert verdict([lost], []).text == "nothing can run on this node: gpu3 cannot take part"
    warned = verdict([node("gpu1", probe=probe(root={"is_noexec": True}))], [])
    assert warned.can_run
    assert [finding.grade for finding in warned.findings] == [Grade.WARNING]


# -- measuring


def test_the_output_of_the_python_probe_is_parsed() -> None:
    done = subprocess.run([sys.executable, "-S", "-c", PYTHON_PROBE], capture_output=True, text=True, check=True)
    found = parse_python({"exit_code": 0, "stdout": "hello from a login\n" + done.stdout, "stderr": "", "seconds": 1.0})
    assert found.python == ".".join(str(part) for part in sys.version_info[:3])
    assert found.error == ""


@pytest.mark.parametrize(
    ("code", "version", "trouble"),
    [
        (127, "", "does not exist"),
        (126, "", "cannot be executed"),
        (0, "2.7.18", "is Python 2.7.18; 3.8 or newer is needed"),
        (0, "3.7.16", "is Python 3.7.16; 3.8 or newer is needed"),
        (0, "3.8.0", ""),
        (0, "3.14.0rc1+", ""),
        (1, "what?", ""),
    ],
)
def test_a_python_that_cannot_run_an_agent_has_a_reason(code: int, version: str, trouble: str) -> None:
    assert python_trouble(code, version) == trouble


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "error"),
    [
        (None, "", "", "it did not end within 120 s"),
        (127, "", "x\n/no/python: No such file or directory\n", "/no/python: No such file or directory"),
        (7, "", "", "exit code 7"),
        (0, "@@distflow-python {", "", "its answer is malformed: @@distflow-python {"),
    ],
)
def test_a_python_without_a_valid_answer_is_an_error(code: int | None, stdout: str, stderr: str, error: str) -> None:
    found = parse_python({"exit_code": code, "stdout": stdout, "stderr": stderr, "seconds": 120.2})
    assert (found.python, found.error) == ("", error)


def test_all_measurements_are_in_the_json_output() -> None:
    from distflow.backends.machines.checks.checking import PoolMeasurements
    from distflow.cli.render.nodes import check_json, check_text
    from distflow.cli.render.tables import Paint
    from distflow.pools.model import Pool

    apps = (GpuApp(gpu_uuid="GPU-0", pid=1, name="x\x1b[31m", used_mib=None),)
    nodes = (replace(node(), gpus=(gpu(0), gpu(1)), apps=apps), node("gpu2", error=NodeUnreachable("gpu2", "gone\x1b[31m")))
    found = verdict(nodes, tried_pairs(2))
    checked = PoolMeasurements(nodes=nodes, pairs=tuple(tried_pairs(2)))
    pool = Pool(name="lab", backend="ssh", nodes=tuple(one.node for one in nodes))
    answer = json.loads(json.dumps(check_json(pool, checked, found)))
    assert_documented(answer, "pool-check")
    assert [one["state"] for one in answer["nodes"]] == ["warning", "error"]
    assert answer["nodes"][0]["gpu_processes"][0] == {
        "gpu": 0, "pid": 1, "name": "x\x1b[31m", "used_mib": None, "user": None, "attempt": None,
    }  # fmt: skip
    text = check_text(checked, found, Paint())
    assert "2 × H100, 80 GiB" in text
    assert "\x1b" not in text, "text of a node must not control the terminal"


@pytest.mark.parametrize(
    ("changes", "about", "words"),
    [
        (
            {"memory": {"available_bytes": GIB // 2, "total_bytes": 64 * GIB}},
            "memory",
            "only 512 MiB of its 64 GiB",
        ),
        ({"shm": {"free_bytes": 1 << 26, "total_bytes": 1 << 26}}, "shm", "only 64 MiB of 64 MiB are free in /dev/shm"),
        ({"limits": {"nofile": 256, "nproc": None, "memlock": None}}, "limits", "may open only 256 files"),
        ({"limits": {"nofile": 1024, "nproc": 100, "memlock": None}}, "limits", "may have only 100 processes and threads"),
        ({"limits": {"memlock": 1 << 16}, "has_rdma": True}, "limits", "may lock only 64 KiB of memory"),
        ({"xids": ["NVRM: Xid (PCI:0000:3b:00): 79"]}, "gpus", "1 GPU error in its kernel's log, the last: NVRM: Xid"),
        ({"xids": ["NVRM: Xid (PCI:0000:3b:00): 79"] * 8}, "gpus", "8 or more GPU errors in its kernel's log"),
    ],
)
def test_problems_for_training_are_warnings(changes: dict[str, Any], about: str, words: str) -> None:
    found = only_finding(node(probe=probe() | changes))
    assert (found.grade, found.about) == (Grade.WARNING, about)
    assert words in found.message
    assert found.hint


def test_sufficient_resources_have_no_findings() -> None:
    sufficient = {
        "memory": {"available_bytes": 60 * GIB, "total_bytes": 64 * GIB},
        "shm": {"free_bytes": 2 * GIB, "total_bytes": 2 * GIB},
        "limits": {"nofile": 1024, "nproc": 4096, "memlock": 1 << 26}, "has_rdma": False, "xids": [],
    }  # fmt: skip
    assert not findings_of(node(probe=probe() | sufficient))
    unknown = {"memory": None, "shm": None, "limits": None, "xids": None}
    assert not findings_of(node(probe=probe() | unknown))


def test_a_gpu_with_memory_errors_is_named() -> None:
    torch = Torch(python="3.12.3", executable="/v/python", version="2.6.0", cuda="12.4", is_available=True, devices=2)
    found = only_finding(replace(node(torch=torch), gpus=(gpu(0), replace(gpu(1), ecc_errors=2))))
    assert found.message.endswith("since its driver was loaded: GPU 1: 2")


def test_a_failed_all_reduce_is_an_error_and_a_slow_one_a_warning() -> None:
    nodes = [node("gpu1"), node("gpu2")]
    names = ("gpu1", "gpu2")
    fast = AllReduce(nodes=names, times=((1 << 20, 0.001),))
    assert fast.best == pytest.approx((1 << 20) / 0.001), "with two nodes, each link carries the data once"
    assert verdict(nodes, tried_pairs(2), fast).can_run
    assert verdict(nodes, tried_pairs(2), fast).findings == ()
    slow = verdict(nodes, tried_pairs(2), AllReduce(nodes=names, times=((1 << 20, 1.0),)))
    assert slow.can_run
    assert slow.findings[0].message == "an all-reduce reaches only 1.0 MB/s"
    failed = verdict(nodes, tried_pairs(2), AllReduce(nodes=names, failed=("gpu2", "RuntimeError: Connection refused")))
    assert not failed.can_run
    assert failed.text == "a gang cannot run on both nodes: an all-reduce between them failed"
    assert failed.findings[0].hint.startswith("training would fail too: check that all ports are open between the nodes")
    why = "it cannot open a port on 10.0.0.2: OSError: [Errno 99] Cannot assign requested address"
    (foreign,) = verdict(nodes, tried_pairs(2), AllReduce(nodes=names, failed=("gpu1", why))).findings
    assert foreign.hint == "training would fail too: set the node's `address` to one of its own addresses"


def _node_with_path(name: str, **found: Any) -> NodeMeasurements:
    listing = {"error": None, "files": 2, "bytes": 3 * GIB, "digest": "d1", "is_complete": True, **found}
    return node(name, probe={**probe(), "paths": {"/data": listing}})


def test_missing_and_different_paths_are_reported() -> None:
    equal = [_node_with_path("gpu1"), _node_with_path("gpu2")]
    assert [*judge_node(equal[0]), *judge_nodes(equal)] == []
    missing = _node_with_path("gpu3", error="/data: No such file or directory")
    (found,) = judge_node(missing)
    assert (found.grade, found.about, found.nodes) == (Grade.ERROR, "path", ("gpu3",))
    assert found.message == "/data cannot be read: /data: No such file or directory"
    # An unreadable path is reported once, and not compared.
    assert list(judge_nodes([*equal, missing])) == []
    (different,) = judge_nodes([*equal, _node_with_path("gpu3", files=1, bytes=GIB, digest="d2")])
    assert (different.grade, different.nodes) == (Grade.WARNING, ("gpu1", "gpu2", "gpu3"))
    assert different.message == "/data has different contents: 2 files, 3.0 GiB on gpu1, gpu2; 1 file, 1.0 GiB on gpu3"
    (different,) = judge_nodes([equal[0], _node_with_path("gpu3", bytes=3 * GIB - 9, digest="d2")])
    assert different.message.endswith(": 2 files, 3,221,225,472 bytes on gpu1; 2 files, 3,221,225,463 bytes on gpu3")
    # The same number of files and the same total size, but other names.
    (different,) = judge_nodes([*equal, _node_with_path("gpu3", digest="d3")])
    assert different.message.endswith("; 2 files, 3,221,225,472 bytes on gpu3; the names or sizes of files differ")
    partial = [_node_with_path(f"gpu{i}", is_complete=False, digest=None, files=i) for i in (1, 2)]
    assert [one.grade for one in judge_node(partial[0])] == [Grade.NOTE]
    assert list(judge_nodes([*partial, equal[0]])) == [], "incomplete listings are not compared"
