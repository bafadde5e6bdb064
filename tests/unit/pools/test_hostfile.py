"""Hostfiles: the meaning of each form of a line, all problems of invalid files, and the resulting nodes and pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.documents.problems import ProblemsFound
from distflow.errors import InputError, NotFound
from distflow.pools.hostfile import Host, choose_pool, nodes_of, parse_hostfile
from distflow.pools.load import Machine, load_hostfile, parse_configuration
from distflow.pools.model import Configuration, Node

MACHINE = Machine(cpus=8, memory=64 << 30, gpus=2, python="/venv/bin/python")
LAB = """
default_pool: lab
pools:
  here: {backend: local}
  lab:
    backend: ssh
    python: /opt/venv/bin/python
    host_key_policy: accept-new
    environment: {A: pool}
    defaults: {user: ubuntu, gpus: 8}
    nodes:
    - gpu1
    - {name: gpu2, host: 192.0.2.2, port: 2222, address: 10.0.0.2, gpus: 4}
"""


def hosts_in(text: str) -> list[tuple[str, str | None, int | None]]:
    hosts, problems = parse_hostfile(text, "hosts")
    assert not problems
    return [(host.host, host.user, host.slots) for host in hosts]


def refusal(text: str) -> str:
    _, problems = parse_hostfile(text, "hosts")
    return "\n".join(problem.as_text() for problem in problems)


def lab() -> Configuration:
    return parse_configuration(LAB, "distflow.yaml", root="/data/node", machine=MACHINE)


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("gpu1", ("gpu1", None, None)),
        ("gpu1 slots=8", ("gpu1", None, 8)),
        ("  gpu1\tslots=8 # the old one", ("gpu1", None, 8)),
        ("gpu1 slots=8 max_slots=16", ("gpu1", None, 8)),
        ("gpu1 max-slots=16", ("gpu1", None, None)),
        ("gpu1 slots = 8", ("gpu1", None, 8)),
        ("user@gpu1 slots=4", ("gpu1", "user", 4)),
        ("gpu1:8", ("gpu1", None, 8)),
        ("user@gpu-1.lab.example:8", ("gpu-1.lab.example", "user", 8)),
        ("192.0.2.7 slots=0", ("192.0.2.7", None, 0)),
        ("[fd00:0::1]", ("fd00::1", None, None)),
        ("[fd00::1]:8", ("fd00::1", None, 8)),
        ("user@[fd00::1] slots=8", ("fd00::1", "user", 8)),
    ],
)
def test_every_form_of_a_line_is_parsed(line: str, host: tuple[str, str | None, int | None]) -> None:
    assert hosts_in(line + "\n") == [host]


def test_a_line_may_name_the_python_of_its_host() -> None:
    hosts, problems = parse_hostfile("gpu1 slots=8 python=/opt/venv/bin/python\nme@gpu2 Python = ~/venv/bin/python\n", "hosts")
    assert not problems
    assert [(host.host, host.slots, host.python) for host in hosts] == [
        ("gpu1", 8, "/opt/venv/bin/python"), ("gpu2", None, "~/venv/bin/python"),
    ]  # fmt: skip
    assert [node.python for node in nodes_of(hosts, Node(name="", host="", root="/x", python="python3"))] == [
        "/opt/venv/bin/python", "~/venv/bin/python",
    ]  # fmt: skip
    assert [node.python for node in choose_pool(lab(), hosts=[Host(host="gpu1", python="/a"), Host(host="gpu2")]).nodes] == [
        "/a", "/opt/venv/bin/python",
    ]  # fmt: skip


def test_comments_and_empty_lines_are_ignored() -> None:
    assert hosts_in("# the lab\n\ngpu1\n   \n#gpu2\ngpu3 # slots=8") == [("gpu1", None, None), ("gpu3", None, None)]


def test_a_host_in_several_plain_lines_has_one_slot_for_each_line() -> None:
    # As in the machine files of batch systems.
    assert hosts_in("gpu1\ngpu2\ngpu1\ngpu1\n") == [("gpu1", None, 3), ("gpu2", None, None)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("gpu1", "gpu1 slots=8"),
        ("gpu1 slots=8", "gpu1"),
        ("gpu1 slots=8", "gpu1 slots=8"),
        ("gpu1", "gpu1:8"),
        ("gpu1", "other@gpu1"),
    ],
)
def test_a_host_given_again_with_slots_or_another_user_is_a_problem(first: str, second: str) -> None:
    assert "hosts:3: error: the host `gpu1` is already in line 1" in refusal(f"{first}\ngpu2\n{second}\n")


def test_all_problems_are_reported_at_once_with_their_lines() -> None:
    messages = refusal(
        "gpu1 slots=x\ngpu2 slts=8\nfd00::1\ngpu[1-4]\ngpu5,gpu6\n-oProxyCommand=x\ngpu4 8\ngpu5 slots=8 slots=9\n"
        "gpu6:8 slots=8\ngpu7 slots=8 max_slots=2\ngpu8 gpu9\n@gpu1\ngpu10:\n[gpu1]\ngpu11 slots=1000000\ngpu12 slots\n"
        "gpu13 python=\ngpu14 python=-c\ngpu15 python=/a python=/b\n"
    )
    for expected in (
        "hosts:1: error: `slots=x`: `slots` must be a whole number",
        "hosts:2: error: unknown word `slts=8`\n    did you mean `slots`?",
        "hosts:3: error: `fd00::1` is not a host\n    write an IPv6 address in brackets",
        "hosts:4: error: `gpu[1-4]` is not a host\n    write each host on a separate line",
        "hosts:5: error: `gpu5,gpu6` is not a host\n    write each host on a separate line",
        "hosts:6: error: `-oProxyCommand=x` is not a host",
        "hosts:7: error: unknown word `8`\n    write `slots=8`",
        "hosts:8: error: `slots` is given twice in this line",
        "hosts:9: error: `slots` is given twice in this line",
        "hosts:10: error: max_slots=2 is less than slots=8",
        "hosts:11: error: unknown word `gpu9`\n    write one host on each line",
        "hosts:12: error: `@gpu1` is not a host",
        "hosts:13: error: `gpu10:`: `slots` must be a whole number",
        "hosts:14: error: `[gpu1]` is not a host",
        "hosts:15: error: `slots=1000000`",
        "hosts:16: error: `slots` has no value\n    write `slots=N`",
        "hosts:17: error: `python=` is not a single path or name\n    write `python=/opt/venv/bin/python` once",
        "hosts:18: error: `python=-c` is not a single path or name",
        "hosts:19: error: `python=/a python=/b` is not a single path or name",
    ):
        assert expected in messages


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_hostfile_without_hosts_is_a_problem(text: str) -> None:
    assert (
        refusal(text) == "hosts: error: the hostfile has no hosts\n    write one host on each line, for example `gpu1 slots=8`"
    )


def test_only_a_few_problems_of_a_file_of_another_kind_are_reported() -> None:
    messages = refusal("this is not hosts\n" * 1000)
    assert messages.startswith("hosts: error: this file does not look like a hostfile")
    assert messages.count("error:") == 4
    assert messages.endswith("hosts:1: error: 2998 more problems from this line on")
    messages = refusal("".join(f"gpu{number} slot=8\n" for number in range(60)))
    assert messages.count("error:") == 51
    assert messages.endswith("hosts:51: error: 10 more problems from this line on\n    check that this file is a hostfile")


@given(st.text(max_size=60))
def test_any_text_has_hosts_or_problems(text: str) -> None:
    hosts, problems = parse_hostfile(text, "hosts")
    assert hosts or problems


def test_directories_and_binary_huge_or_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2 << 20)
    for name, words in (
        ("binary", "binary data .*\n.*name a hostfile"),
        ("huge", "too large: 2 MiB, and the maximum is 1 MiB\n    name a hostfile"),
        ("", "a directory, not a regular file\n    name a hostfile$"),
        ("none", "does not exist"),
    ):
        with pytest.raises(ProblemsFound, match=words):
            load_hostfile(str(tmp_path / name))


def test_hosts_become_nodes_with_the_settings_of_the_pool_or_of_known_nodes() -> None:
    base = Node(name="", host="", root="/scratch", python="/opt/python", user="ubuntu", gpus=8)
    known = Node(name="gpu2", host="192.0.2.2", port=2222, root="/x", python="/y", gpus=4)
    one, two, three = nodes_of(
        [Host(host="gpu1"), Host(host="gpu2", slots=2), Host(host="gpu3", user="root", slots=1)], base, [known]
    )
    assert (one.name, one.host, one.root, one.python, one.user, one.gpus) == (
        "gpu1", "gpu1", "/scratch", "/opt/python", "ubuntu", 8,
    )  # fmt: skip
    assert (two.host, two.port, two.root, two.gpus) == ("192.0.2.2", 2222, "/x", 2)
    assert (three.user, three.gpus) == ("root", 1)


def test_a_hostfile_is_a_separate_pool_if_no_pool_over_ssh_is_selected() -> None:
    here = parse_configuration("pools: {here: {backend: local}}", "d.yaml", root="/n", machine=MACHINE)
    for pool in (
        choose_pool(here, hosts=[Host(host="gpu1", slots=8)]),
        choose_pool(here, wanted="here", hosts=[Host(host="gpu1", slots=8)]),
        choose_pool(lab(), given="hostfile", hosts=[Host(host="gpu1", slots=8)]),
    ):
        assert (pool.name, pool.backend, pool.host_key_policy) == ("hostfile", "ssh", None)
        assert pool.nodes == (Node(name="gpu1", host="gpu1", root="~/.distflow", python="python3", gpus=8),)


@pytest.mark.parametrize("flags", [{}, {"given": "lab"}, {"wanted": "lab"}])
def test_the_settings_of_a_pool_over_ssh_apply_to_a_hostfile(flags: dict[str, str]) -> None:
    pool = choose_pool(lab(), hosts=[Host(host="gpu9"), Host(host="gpu2")], **flags)
    assert (pool.name, pool.host_key_policy, [node.name for node in pool.nodes]) == ("lab", "accept-new", ["gpu9", "gpu2"])
    nine, two = pool.nodes
    assert (nine.user, nine.python, nine.gpus, dict(nine.environment)) == ("ubuntu", "/opt/venv/bin/python", 8, {"A": "pool"})
    assert (two.host, two.port, two.address, two.gpus) == ("192.0.2.2", 2222, "10.0.0.2", 4)


def test_a_hostfile_for_a_pool_that_cannot_have_one_is_refused() -> None:
    hosts = [Host(host="gpu1")]
    with pytest.raises(InputError, match="the pool `here` cannot use a hostfile"):
        choose_pool(lab(), given="here", hosts=hosts)
    with pytest.raises(
        NotFound,
        match=r"`lba` in distflow\.yaml, but the spec requests it with `pool`\ndid you mean `lab`\? .*; `--pool hostfile`",
    ):
        choose_pool(lab(), wanted="lba", hosts=hosts)
    with pytest.raises(NotFound, match=r"there is no pool `hostfile` in distflow\.yaml\npools: `here`, `lab`$"):
        choose_pool(lab(), given="hostfile")


def test_a_pool_may_have_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1 slots=2\nme@gpu2\n")
    text = "pools:\n  lab: {backend: ssh, hostfile: hosts, defaults: {gpus: 8, user: ubuntu}}\n"
    pool = parse_configuration(text, str(tmp_path / "distflow.yaml"), root="/n", machine=MACHINE).pools["lab"]
    assert [(node.name, node.user, node.gpus) for node in pool.nodes] == [("gpu1", "ubuntu", 2), ("gpu2", "me", 8)]


def test_problems_of_a_pools_hostfile_are_reported_with_others(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1 slots=x\n")
    text = (
        "default_pool: a\npools:\n  a: {backend: ssh, hostfile: hosts, nodes: [x]}\n  b: {backend: local, hostfile: hosts}\n"
        "  c: {backend: ssh, hostfile: none}\n  d: {backend: ssh}\n  e: {backend: ssh, hostfile: [x]}\n"
    )
    file = tmp_path / "distflow.yaml"
    with pytest.raises(ProblemsFound) as caught:
        parse_configuration(text, str(file), root="/n", machine=MACHINE)
    messages = str(caught.value)
    for expected in (
        f"{file}:3: error: the pool has both `nodes` and `hostfile`",
        f"{tmp_path}/hosts:1: error: `slots=x`: `slots` must be a whole number",
        f"{file}:4: error: `hostfile` needs `backend: ssh`",
        f"{tmp_path}/none: error: the file does not exist",
        f"{file}:6: error: a pool with `backend: ssh` needs `nodes` or a `hostfile`",
        f"{file}:7: error: `pools.e.hostfile` must be a string",
    ):
        assert expected in messages
