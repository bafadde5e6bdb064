"""``distributed.json``, as ``valohai-utils`` and ``distflow.distributed`` read it, and the programs that look up names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from distflow import distributed as calls
from distflow.distributed import Distributed
from distflow.layout.checks.group_checks import check_layout
from distflow.plan.bind import bind
from distflow.plan.compatibility import lookup_scripts
from distflow.plan.compile import compile_plan
from distflow.plan.model import Binding, BoundLaunch, GroupPlan, TaskBinding
from distflow.spec.parse import load_spec_text
from distflow.structs import replace
from unit.supervisor.gangs import node

GANG = """
workflow:
  name: gang
  groups:
  - name: train
    tasks:
    - {name: helper, command: [sleep, '1']}
    - {name: worker, replicas: 10, ranks: {size: 1}, command: [python3, train.py]}
    - {name: master, lead: true, ranks: {size: 2}, command: [python3, train.py]ENV}
"""
TASKS = ("helper", *(f"worker-{i}" for i in range(10)), "master")


def plan_of(text: str) -> GroupPlan:
    spec, _ = load_spec_text(text, "spec.yaml", Path.cwd())
    worlds, problems = check_layout(spec)
    assert not problems
    return compile_plan(spec, worlds, pool="lab", bundles={}).groups[0]


def launches_of(group: GroupPlan) -> dict[str, BoundLaunch]:
    tasks = {one.task: TaskBinding(node=f"n{number}", address=f"10.0.0.{number}") for number, one in enumerate(group.launches)}
    nodes = {one.node: node(one.node) for one in tasks.values()}
    binding = Binding(tasks=tasks, port=29500, leased_at=1_653_386_161.7)
    return bind(group, binding, workflow_id="gang-3", nodes=nodes)


def write_files(launch: BoundLaunch, folder: Path) -> Path:
    """Write the files of a launch into the folder, and return the folder."""
    for file in launch.files:
        (folder / Path(file.path).name).write_text(file.text or "")
    return folder


def test_members_are_numbered_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    group = plan_of(GANG.replace("ENV", ""))
    found = json.loads((write_files(launches_of(group)["worker-0"], tmp_path) / "distributed.json").read_text())
    assert [one["member_id"] for one in found["members"]] == [str(number) for number in range(12)]
    assert [one["identity"] for one in found["members"]] == ["n11", *(f"n{i}" for i in range(1, 11)), "n0"]
    assert found["config"] == {"group_name": "task-gang-3-train", "member_id": "1", "required_count": 12}
    assert found["self"] == found["members"][1]
    assert found["self"] == {
        "announce_time": "2022-05-24T09:56:01",
        "identity": "n1",
        "job_id": "exec-gang-3-worker-0-0",
        "member_id": "1",
        "network": {"exposed_ports": {}, "local_ips": ["10.0.0.1"], "public_ips": ["10.0.0.1"]},
    }
    assert yaml.safe_load((tmp_path / "distributed.yaml").read_text()) == found


def test_the_environment_of_a_task_names_the_directory_of_its_files() -> None:
    launch = launches_of(plan_of(GANG.replace("ENV", "")))["master"]
    assert {file.path for file in launch.files} == {"config/distributed.json", "config/distributed.yaml"}
    assert launch.environment["VH_CONFIG_DIR"] == "@@ATTEMPT_DIR@@/config"
    assert launch.environment["VH_JOB_ID"] == "exec-gang-3-master-0"


def test_a_task_with_variables_of_valohai_in_the_spec_gets_no_files() -> None:
    group = plan_of(GANG.replace("ENV", ", environment: {VH_CONFIG_DIR: /valohai/config}"))
    launches = launches_of(group)
    assert launches["master"].files == ()
    assert [name for name in launches["master"].environment if name.startswith("VH_")] == ["VH_CONFIG_DIR"]
    found = json.loads(launches["worker-0"].files[0].text or "")
    assert found["config"]["required_count"] == len(found["members"]) == 11


def test_a_task_without_other_tasks_gets_no_files_or_variables_of_valohai() -> None:
    launch = launches_of(plan_of("workflow: {name: w, tasks: [{name: t, command: ['true']}]}"))["t"]
    assert launch.files == ()
    assert not any(name.startswith("VH_") for name in launch.environment)


def test_the_functions_of_distflow_distributed_read_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = plan_of(GANG.replace("ENV", ""))
    monkeypatch.setenv("VH_CONFIG_DIR", str(write_files(launches_of(group)["worker-3"], tmp_path)))
    calls.flush_state()
    assert calls.is_distributed_task()
    assert (calls.rank, calls.member_id, calls.required_count, calls.group_name) == (4, "4", 12, "task-gang-3-train")
    assert calls.me().identity == "n4"
    assert calls.master().primary_local_ip == "10.0.0.11"
    assert [one.rank for one in calls.members()] == list(range(12))
    assert calls.member("10").identity == "n10"
    with pytest.raises(RuntimeError, match="'12'"):
        calls.member("12")
    assert calls.me().primary_public_ip == "10.0.0.4"
    with pytest.raises(AttributeError):
        calls.unknown_name  # noqa: B018
    calls.flush_state()


def test_members_are_ranked_by_their_ids_as_numbers_or_as_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(launches_of(plan_of(GANG.replace("ENV", "")))["master"].files[0].text or "")
    monkeypatch.setenv("VH_CONFIG_DIR", str(tmp_path))
    for ids, order in ((["10", "9", "1"], ["1", "9", "10"]), (["10", "9", "b"], ["10", "9", "b"])):
        members = [dict(found["members"][0], member_id=one) for one in ids]
        (tmp_path / "distributed.json").write_text(json.dumps(found | {"members": members}))
        gang = Distributed()
        assert [one.member_id for one in sorted(gang.members(), key=lambda one: one.rank)] == order


@pytest.mark.parametrize("text", [None, "no json", "[]", "{}", '{"config": {}, "members": [{}]}'])
def test_with_a_missing_or_malformed_file_a_task_is_not_distributed(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VH_CONFIG_DIR", str(tmp_path))
    if text is not None:
        (tmp_path / "distributed.json").write_text(text)
    assert not Distributed().is_distributed_task()
    with pytest.raises((OSError, ValueError), match="distributed.json" if text != "no json" else "Expecting"):
        Distributed().config  # noqa: B018


def test_valohais_package_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("valohai.internals.distributed_config", reason="valohai-utils is not installed")
    group = plan_of(GANG.replace("ENV", ""))
    launch = launches_of(group)["worker-9"]
    config = theirs.DistributedConfig.from_json_data(
        json.loads((write_files(launch, tmp_path) / "distributed.json").read_text())
    )
    monkeypatch.setenv("VH_CONFIG_DIR", str(tmp_path))
    ours = Distributed()
    assert (config.group_name, config.member_id, config.required_count) == (ours.group_name, "10", 12)
    for one, other in zip(config.members, ours.members(), strict=True):
        names = (
            "announce_time",
            "identity",
            "job_id",
            "member_id",
            "rank",
            "is_master",
            "primary_local_ip",
            "primary_public_ip",
        )
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    import valohai

    monkeypatch.setenv("VH_JOB_ID", launch.environment["VH_JOB_ID"])
    valohai.distributed.flush_state()
    assert valohai.distributed.is_distributed_task()
    assert valohai.distributed.rank == 10
    assert valohai.distributed.master().identity == "n11"
    valohai.distributed.flush_state()


def test_an_older_plan_without_members_has_no_files() -> None:
    """Earlier versions of distflow stored such plans."""
    group = plan_of(GANG.replace("ENV", ""))
    old = replace(group, launches=tuple(replace(launch, member=None) for launch in group.launches))
    assert launches_of(old)["master"].files == ()


PROGRAMS = ("nslookup", "dig", "host")
ADDRESSES = {"@@ADDRESS:master@@": "192.0.2.7", "@@ADDRESS:worker@@": "2001:db8::7"}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with distflow's programs for name look-ups, which know the addresses of both tasks."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for file in lookup_scripts(["nslookup getent dig host", *ADDRESSES]):
        text = file.text or ""
        for placeholder, address in ADDRESSES.items():
            text = text.replace(placeholder, address)
        path = tmp_path / file.path
        path.write_text(text)
        path.chmod(file.mode)
    return folder


def run(tools: Path, script: str, path: str = os.environ["PATH"]) -> str:
    """Run a script with the tools first in its ``PATH``, and return its output and exit code."""
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": f"{tools}:{path}"}, capture_output=True, text=True, timeout=30, check=False
    )
    return f"{done.stdout}{done.stderr}({done.returncode})"


@pytest.mark.parametrize(
    "script",
    [
        # The forms that OSMO's pages and specs teach.
        r'nslookup HOST | grep -oP "\\d+.\\d+.\\d+.\\d+" | tail -n 1',
        "nslookup HOST | grep Address | tail -1 | awk '{print $2}'",
        "nslookup HOST | awk '/^Address: / { print $2 }'",
        "nslookup -type=A HOST | sed -n 's/^Address: //p'",
        "nslookup HOST | grep -A1 Name: | tail -n 1 | cut -d' ' -f2",
        "getent hosts HOST | awk '{ print $1 }'",
        "getent ahostsv4 HOST | head -n 1 | awk '{ print $1 }'",
        "dig +short HOST",
        "dig HOST A +short | head -n1",
        "dig HOST | grep -A1 'ANSWER SECTION' | tail -n 1 | awk '{print $5}'",
        "host HOST | awk '{print $NF}'",
        "host -t A HOST | grep 'has address' | cut -d' ' -f4",
    ],
)
def test_every_usual_lookup_prints_the_address(tools: Path, script: str) -> None:
    assert run(tools, script.replace("HOST", "192.0.2.7")) == "192.0.2.7\n(0)"


@pytest.mark.parametrize(
    "script", ["nslookup HOST | sed -n 's/^Address: //p'", "dig +short HOST", "host HOST | awk '{print $NF}'"]
)
def test_a_lookup_prints_an_ipv6_address(tools: Path, script: str) -> None:
    assert run(tools, script.replace("HOST", "2001:db8::7")) == "2001:db8::7\n(0)"


@pytest.mark.parametrize(
    "command",
    [
        "nslookup example.org",
        "nslookup example.org 192.0.2.7",  # here the address is that of the name server
        "nslookup -type=PTR 192.0.2.7",
        "dig +short 192.0.2.70",
        "dig -x 192.0.2.7",
        "host -t PTR 192.0.2.7",
        "getent passwd 192.0.2.7",
        "getent hosts *",
    ],
)
def test_all_other_queries_run_the_real_program(tools: Path, tmp_path: Path, command: str) -> None:
    real = tmp_path / "real"
    real.mkdir()
    program, _, words = command.partition(" ")
    (real / program).write_text('#!/bin/sh\necho "real: $*"; exit 3\n')
    (real / program).chmod(0o700)
    assert run(tools, f"set -f; {command}", f"{real}:{os.environ['PATH']}") == f"real: {words}\n(3)"


def test_a_missing_real_program_is_reported(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [str(tools / "nslookup"), "example.org"], env={"PATH": f"{tools}:{tmp_path / 'empty'}"}, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("nslookup: not found on this node")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_query_for_the_version_runs_the_real_program(tools: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} not found: apt-get install bind9-dnsutils")
    # The query for the version needs no network.
    version = {"nslookup": "-version", "dig": "-v", "host": "-V"}[program]
    assert run(tools, f"{program} {version}") == run(tools, f"{shutil.which(program)} {version}")


@pytest.mark.parametrize(
    "texts",
    [
        ["nslookup example.org"],
        ["python3 train.py --host @@ADDRESS:master@@"],
        ["curl http://@@ADDRESS:master@@:80/ --header 'host: x' /usr/bin/host my.host host.txt host=1"],
    ],
)
def test_tasks_that_look_up_no_address_get_no_tools(texts: list[str]) -> None:
    assert lookup_scripts(texts) == ()
