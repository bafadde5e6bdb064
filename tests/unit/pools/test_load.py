"""The configuration: the search for its file, its pools and nodes, and all problems of invalid ones."""

from __future__ import annotations

import grp
import json
import os
import pwd
from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.errors import InputError
from distflow.pools.load import (
    Machine,
    configuration_schema_text,
    count_gpus,
    find_configuration,
    load_configuration,
    parse_configuration,
    parse_memory,
    this_machine,
)
from distflow.pools.model import Configuration, Node

MACHINE = Machine(cpus=8, memory=64 << 30, gpus=2, python="/venv/bin/python")


def parsed(text: str) -> Configuration:
    return parse_configuration(text, "distflow.yaml", root="/data/node", machine=MACHINE)


def only_node(text: str) -> Node:
    (pool,) = parsed(text).pools.values()
    (node,) = pool.nodes
    return node


def refusal(text: str) -> str:
    with pytest.raises(ProblemsFound) as caught:
        parsed(text)
    return str(caught.value)


def environ(home: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data"), **more}


def write_configuration(folder: Path, name: str = "distflow.yaml") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("pools: {local: {backend: local}}\n")
    return str(folder / name)


def test_without_a_file_the_only_pool_is_this_machine(tmp_path: Path) -> None:
    found = load_configuration(tmp_path, environ(tmp_path), MACHINE)
    assert (list(found.pools), found.default_pool, found.file) == (["local"], "local", None)
    pool = found.pools["local"]
    assert pool.shares_nodes
    assert pool.nodes == (
        Node(
            name="local",
            host="localhost",
            address="127.0.0.1",
            root=str(tmp_path / "data" / "distflow" / "node"),
            python="/venv/bin/python",
            gpus=2,
            cpus=8,
            memory=64 << 30,
        ),
    )


def test_the_root_of_the_local_node_is_in_the_state_directory(tmp_path: Path) -> None:
    found = load_configuration(tmp_path, environ(tmp_path, DISTFLOW_STATE=str(tmp_path / "state")), MACHINE)
    assert found.pools["local"].nodes[0].root == str(tmp_path / "state" / "node")


def test_a_configured_root_overrides_the_state_directory(tmp_path: Path) -> None:
    (tmp_path / "distflow.yaml").write_text("pools: {here: {backend: local, root: /scratch/me}}\n")
    found = load_configuration(tmp_path, environ(tmp_path, DISTFLOW_STATE="/state"), MACHINE)
    assert found.pools["here"].nodes[0].root == "/scratch/me"


def test_the_search_for_the_file_ends_at_the_repository(tmp_path: Path) -> None:
    repository = tmp_path / "home" / "repo"
    (repository / ".git").mkdir(parents=True)
    above = write_configuration(tmp_path / "home")
    inner = repository / "a" / "b"
    inner.mkdir(parents=True)
    assert find_configuration(inner, environ(tmp_path)) is None
    assert find_configuration(tmp_path / "home", environ(tmp_path / "home")) == above
    own = write_configuration(repository)
    assert find_configuration(inner, environ(tmp_path)) == own
    nearer = write_configuration(repository / "a")
    assert find_configuration(inner, environ(tmp_path)) == nearer


def test_the_search_for_the_file_ends_at_the_home_directory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_configuration(tmp_path)
    (home / "a").mkdir(parents=True)
    assert find_configuration(home / "a", environ(home)) is None
    own = write_configuration(home)
    assert find_configuration(home / "a", environ(home)) == own


def test_outside_of_home_and_repositories_only_the_working_directory_is_searched(tmp_path: Path) -> None:
    # All users can write to /tmp, so a file there must not configure a run.
    write_configuration(tmp_path)
    (tmp_path / "a").mkdir()
    assert find_configuration(tmp_path / "a", environ(tmp_path / "home")) is None


def test_the_file_in_the_users_configuration_directory_comes_last(tmp_path: Path) -> None:
    user = write_configuration(tmp_path / "config" / "distflow")
    assert find_configuration(tmp_path, environ(tmp_path)) == user
    nearer = write_configuration(tmp_path)
    assert find_configuration(tmp_path, environ(tmp_path)) == nearer


def change_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of a file. Without root, give this process another user id instead."""
    if os.geteuid() == 0:
        os.chown(path, 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)


def test_a_file_of_another_user_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_configuration(tmp_path)
    change_owner(Path(path), monkeypatch)
    with pytest.raises(InputError, match=r"distflow does not trust the configuration .*: it belongs to the user") as caught:
        load_configuration(tmp_path, environ(tmp_path), MACHINE)
    assert f"DISTFLOW_CONFIG={path}" in caught.value.hint
    assert load_configuration(tmp_path, environ(tmp_path, DISTFLOW_CONFIG=path), MACHINE).file == path
    if os.geteuid() == 0:
        assert find_configuration(tmp_path, environ(tmp_path, SUDO_UID="54321")) == path


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a link")
    (tmp_path / "work").mkdir()
    link = tmp_path / "work" / "distflow.yaml"
    link.symlink_to(write_configuration(tmp_path / "mine"))
    assert find_configuration(tmp_path / "work", environ(tmp_path)) == str(link)
    os.chown(link, 54321, 54321, follow_symlinks=False)
    with pytest.raises(InputError, match="it belongs to the user") as caught:
        find_configuration(tmp_path / "work", environ(tmp_path))
    assert f"`sudo chown -h $(id -un) {link}`" in caught.value.hint
    change_owner(link.resolve(), monkeypatch)
    os.chown(link, 0, 0, follow_symlinks=False)
    with pytest.raises(InputError, match="it belongs to the user") as caught:
        find_configuration(tmp_path / "work", environ(tmp_path))
    assert f"`sudo chown $(id -un) {link}`" in caught.value.hint


@pytest.mark.parametrize(("mode", "why"), [(0o646, "every user may write"), (0o664, "every user in the group"), (0o644, "")])
def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path, mode: int, why: str) -> None:
    path = Path(write_configuration(tmp_path))
    if os.geteuid() == 0:
        os.chown(path, -1, 54321)
    elif "group" in why:
        pytest.skip("only root can give a file to any group")
    path.chmod(mode)
    if not why:
        assert find_configuration(tmp_path, environ(tmp_path)) == str(path)
        return
    with pytest.raises(InputError, match=why) as caught:
        find_configuration(tmp_path, environ(tmp_path))
    assert f"`chmod go-w {path}`" in caught.value.hint


def test_roots_file_that_others_may_write_to_needs_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_configuration(tmp_path / "my project"))
    path.chmod(0o646)
    if os.geteuid() != 0:
        pytest.skip("only root can create a file of root")
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(InputError, match="every user may write") as caught:
        find_configuration(path.parent, environ(tmp_path))
    assert f"`sudo chmod go-w '{path}'`" in caught.value.hint


def test_a_file_that_the_users_private_group_may_write_to_is_accepted(tmp_path: Path) -> None:
    path = Path(write_configuration(tmp_path))
    user = pwd.getpwuid(os.geteuid())
    group = grp.getgrgid(user.pw_gid)
    if group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        pytest.skip("this user has no private group")
    path.chmod(0o664)
    assert find_configuration(tmp_path, environ(tmp_path)) == str(path)


def test_a_repository_of_another_user_is_not_a_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / ".git").mkdir(parents=True)
    above = write_configuration(tmp_path / "shared")
    project = tmp_path / "shared" / "project"
    project.mkdir()
    assert find_configuration(project, environ(tmp_path / "home")) == above
    change_owner(tmp_path / "shared" / ".git", monkeypatch)
    assert find_configuration(project, environ(tmp_path / "home")) is None


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ProblemsFound, match=r"/no\.yaml: error: the file does not exist"):
        load_configuration(tmp_path, environ(tmp_path, DISTFLOW_CONFIG="/no.yaml"), MACHINE)
    named = write_configuration(tmp_path / "x", "other.yaml")
    assert load_configuration(tmp_path, environ(tmp_path, DISTFLOW_CONFIG=named), MACHINE).file == named


def test_a_directory_named_like_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "distflow.yaml").mkdir()
    with pytest.raises(ProblemsFound, match="this is a directory"):
        load_configuration(tmp_path, environ(tmp_path), MACHINE)


def test_keys_of_a_node_override_the_defaults_which_override_the_pool() -> None:
    node = only_node("""
pools:
  here:
    backend: local
    root: /pool
    python: /pool/python
    setup: from pool
    environment: {A: pool, B: pool, C: pool}
    defaults:
      {python: /defaults/python, gpus: 8, memory: 1Gi, platform: h100,
       environment: {A: defaults, B: defaults}, labels: {rack: 1}}
    nodes:
    - {name: me, gpus: 0, environment: {A: node}, labels: {row: on}, cpus: 3, address: 10.0.0.1}
""")
    assert (node.name, node.root, node.python, node.setup) == ("me", "/pool", "/defaults/python", "from pool")
    assert (node.gpus, node.cpus, node.memory, node.platform, node.address) == (0, 3, 1 << 30, "h100", "10.0.0.1")
    assert node.environment == {"A": "node", "B": "defaults", "C": "pool"}
    assert node.labels == {"rack": "1", "row": "on"}


@pytest.mark.parametrize("nodes", ["[me]", "[{name: me}]", "[{host: me}]"])
def test_a_node_is_a_name_or_a_mapping(nodes: str) -> None:
    assert only_node(f"pools: {{here: {{backend: local, nodes: {nodes}}}}}").name == "me"


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert only_node("pools: {here: {backend: local, root: ~/.distflow}}").root == "/home/me/.distflow"


def test_durations_and_sizes_may_have_units() -> None:
    pool = parsed(
        "pools: {here: {backend: local, stop_grace: 0, node_lost_after: 2m, retention: 7d, ping: 1.5, max_log: 64Mi}}"
    ).pools["here"]
    assert pool.max_log == 64 << 20
    assert (pool.stop_grace_s, pool.node_lost_after_s, pool.retention_s, pool.ping_s) == (0, 120, 7 * 86400, 1.5)
    assert pool.connect_timeout_s == 10


def test_the_default_pool_is_the_named_one_or_the_only_one() -> None:
    assert parsed("pools: {a: {backend: local}}").default_pool == "a"
    assert parsed("default_pool: b\npools: {a: {backend: local}, b: {backend: local}}").default_pool == "b"
    assert "add `default_pool: a`" in refusal("pools: {a: {backend: local}, b: {backend: local}}")
    assert "there is no pool `lba`\n    did you mean `lab`?" in refusal("default_pool: lba\npools: {lab: {backend: local}}")


def test_the_resources_of_an_ssh_node_are_unknown_unless_the_file_has_them() -> None:
    pool = parsed(
        "pools:\n  lab:\n    backend: ssh\n    host_key_policy: accept-new\n    defaults: {user: me}\n    nodes:\n"
        "    - gpu1\n    - {name: gpu2, host: 192.0.2.2, port: 2222, identity_file: /k, root: ~/x, gpus: 4}\n"
    ).pools["lab"]
    one, two = pool.nodes
    assert (one.name, one.host, one.port, one.user, one.root, one.python) == (
        "gpu1",
        "gpu1",
        None,
        "me",
        "~/.distflow",
        "python3",
    )
    assert (one.address, one.gpus, one.cpus, one.memory) == (None, None, None, None)
    assert (two.host, two.port, two.identity_file, two.root, two.gpus) == ("192.0.2.2", 2222, "/k", "~/x", 4)
    assert pool.host_key_policy == "accept-new"
    assert not pool.shares_nodes


def test_a_pool_over_ssh_needs_nodes() -> None:
    assert "needs `nodes`" in refusal("pools:\n  lab:\n    backend: ssh\n")


def test_all_problems_are_reported_at_once_with_their_lines() -> None:
    messages = refusal("""\
defaultpool: a
pools:
  a:
    backend: locl
    root: relative/dir
    ping: 0
    stop_grace: 5x
    defaults: {gpu: 8, memory: lots}
    environment: {3x: 1}
  b:
    backend: local
    nodes: [{name: x, prt: 22}, x, 5, {name: y, lease_dir: z}]
  -bad-: {}
""")
    for expected in (
        "distflow.yaml:1: error: unknown key `defaultpool` at the top of the document\n    did you mean `default_pool`?",
        "distflow.yaml:2: error: there are several pools",
        "distflow.yaml:4: error: `pools.a.backend` must be one of `local`",
        "distflow.yaml:5: error: `pools.a.root` must be an absolute path",
        "distflow.yaml:6: error: `pools.a.ping` must be more than 0",
        "distflow.yaml:7: error: `pools.a.stop_grace`: `5x` is not a duration",
        "distflow.yaml:8: error: unknown key `gpu` in `pools.a.defaults`\n    did you mean `gpus`?",
        "distflow.yaml:8: error: `pools.a.defaults.memory`: `lots` is not a number of bytes",
        "distflow.yaml:9: error: `3x` is not a valid name here",
        "distflow.yaml:12: error: unknown key `prt` in `pools.b.nodes[0]`\n    did you mean `port`?",
        "distflow.yaml:12: error: the node `x` is given twice",
        "distflow.yaml:12: error: `pools.b.nodes[2]` must be a name, or a mapping",
        "distflow.yaml:12: error: `pools.b.nodes[3].lease_dir` must be an absolute path",
        "distflow.yaml:12: error: a pool with `backend: local` has 2 nodes",
        "distflow.yaml:13: error: `-bad-` is not a valid name here",
        "distflow.yaml:13: error: `pools.-bad-` has no `backend`",
    ):
        assert expected in messages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the document is empty"),
        ("- a", "must be a mapping with the key `pools`"),
        ("pools: {}", "`pools` is empty"),
        ("pools: [a]", "`pools` must be a mapping of names"),
        ("pools:", "`pools` is empty"),
        ("backend: local", "indent the keys of the pool below `pools:`"),
        ("pools: {a: local}", "`pools.a` must be a mapping with `backend`"),
        ("pools: {a: {backend: local, nodes: }}", "`pools.a.nodes` is empty"),
        ("pools: {a: {backend: local", "is missing"),
        ("pools: {a: {backend: ssh, nodes: [{name: n, port: 99999}]}}", "`pools.a.nodes[0].port` must be at most 65535"),
        ("pools: {a: {backend: ssh, nodes: [{name: n, port: 0}]}}", "`pools.a.nodes[0].port` must be at least 1"),
        ('pools: {a: {backend: local, setup: "cd /x\\0"}}', "distflow.yaml:1: error: `pools.a.setup` contains a NUL byte"),
    ],
)
def test_an_invalid_document_is_refused_with_the_reason(text: str, words: str) -> None:
    assert words in refusal(text)


def test_the_schema_is_valid_and_nodes_have_all_keys_of_defaults() -> None:
    import jsonschema

    schema = json.loads(configuration_schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    defaults, node = (set(schema["$defs"][name]["properties"]) for name in ("defaults", "node"))
    assert node - defaults == {"name"}
    assert defaults <= node


def test_gpus_are_counted_from_their_devices() -> None:
    assert count_gpus(["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null", "xnvidia2"]) == 3


def test_memory_is_read_from_meminfo() -> None:
    assert parse_memory("MemTotal:       16384256 kB\nMemFree: 1 kB\n") == 16384256 * 1024
    assert parse_memory("") is None


def test_this_machine_has_cpus_memory_and_a_python() -> None:
    machine = this_machine()
    assert machine.cpus
    assert machine.memory
    assert Path(machine.python).exists()


def test_a_directory_that_may_not_be_searched_has_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def refused(path: object, *arguments: object, **options: object) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refused)
    assert find_configuration(tmp_path, {"HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent"}) is None
