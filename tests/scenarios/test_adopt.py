"""``workflow adopt`` finds workflows on their nodes: on another machine, or after the state directory was lost or damaged."""

from __future__ import annotations

import copy
import json
import shutil
from typing import TYPE_CHECKING, Any

from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from scenarios.conftest import Cli
    from scenarios.lab import Lab

WAITS = """
workflow:
  name: waits
  tasks:
  - name: one
    command: [sh, -c, 'echo first line; while [ ! -e GO ]; do sleep 0.2; done; echo last line; exit 0']
"""
FAILS = """
workflow:
  name: fails
  tasks:
  - name: one
    command: [sh, -c, 'echo it breaks; exit 3']
"""
STAGES = """
workflow:
  name: stages
  tasks:
  - name: first
    command: [sh, -c, 'echo up; while [ ! -e GO ]; do sleep 0.2; done; exit CODE']
    exitActions: {RESCHEDULE: "7"}
  - name: second
    command: [sh, -c, 'echo second']
    inputs: [{task: first}]
"""


def on_another_machine(cli: Cli) -> Cli:
    """Return the same user at another machine: the same nodes, but another state directory."""
    other = copy.copy(cli)
    other.state = cli.folder / "other-state"
    other.environment = cli.environment | {"DISTFLOW_STATE": str(other.state)}
    return other


def adopt(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    done = cli.run("workflow", "adopt", "-t", "json", *arguments)
    assert done.code == 0, done.err
    return list(json.loads(done.out)["workflows"])


def attempts(cli: Cli) -> list[str]:
    """Return all attempts that were ever started, without the uuids of their workflows."""
    return sorted("/".join(path.parts[-4:-1]) for path in cli.root.glob("*/*/*/*/launch.json"))


def test_another_machine_adopts_running_and_ended_workflows(cli: Cli) -> None:
    go, other = cli.folder / "go", on_another_machine(cli)
    # Both machines give out the id waits-1.
    mine = other.submit(other.spec(WAITS.replace("GO", str(go)), "mine.yaml"))
    other.await_log(mine, "first line")
    runs = cli.submit(cli.spec(WAITS.replace("GO", str(go))), "--set-env", "TOKEN=canary-5ecret")
    fails = cli.submit(cli.spec(FAILS))
    cli.await_status(fails, "FAILED")
    running = cli.await_running(runs)["one"]
    assert (mine, runs, fails) == ("waits-1", "waits-1", "fails-1")

    candidates = {one["name"]: one for one in adopt(other, "--dry-run")}
    assert {name: one["adopted"] for name, one in candidates.items()} == {runs: True, fails: True}
    unsigned = "its record is not signed with the key of this state directory; read its spec before you restart it"
    assert [one["notes"][0] for one in candidates.values()] == [unsigned] * 2
    assert other.run("workflow", "query", fails).code == 2
    text = other.run("workflow", "adopt")
    assert text.code == 0, text.err
    assert text.out == (
        "waits-2: adopted\n  its id was waits-1, which another workflow has on this machine\n"
        "  its record is not signed with the key of this state directory; "
        "read its spec (`distflow workflow spec waits-2`) before you restart it\n"
        "  the values of --set-env are gone (TOKEN): a restart needs them again\nfails-1: adopted\n"
        "  its record is not signed with the key of this state directory; "
        "read its spec (`distflow workflow spec fails-1`) before you restart it\n"
    )
    assert adopt(other) == []
    assert other.run("workflow", "adopt").out == "Nothing to adopt: the store has every workflow that the nodes reported.\n"

    failed = other.await_status("fails-1", "FAILED")
    task = failed["groups"][0]["tasks"][0]
    assert (task["exit_code"], task["status"]) == (3, "FAILED")
    other.await_log("fails-1", "[one] it breaks")
    adopted = other.await_running("waits-2")["one"]
    assert (adopted["pid"], adopted["node_name"]) == (running["pid"], "local")
    other.await_log("waits-2", "[one] first line")
    assert "adopted from local" in other.run("workflow", "events", "waits-2").out

    go.touch()
    for one, workflow in ((cli, runs), (other, "waits-2"), (other, mine)):
        one.await_status(workflow, "COMPLETED")
        one.await_log(workflow, "[one] first line\n[one] last line\n")
    assert len(attempts(cli)) == 3
    for note in cli.root.glob("*/*/*/*/workflow.json"):
        assert note.stat().st_mode & 0o777 == 0o600
        assert b"canary-5ecret" not in note.read_bytes()
    assert other.submit(other.spec(FAILS)) == "fails-2"


def test_a_damaged_store_is_set_aside_and_its_workflows_are_adopted(cli: Cli) -> None:
    go = cli.folder / "go"
    runs = cli.submit(cli.spec(WAITS.replace("GO", str(go))))
    fails = cli.submit(cli.spec(FAILS))
    cli.await_status(fails, "FAILED")
    cli.await_running(runs)
    store = cli.state / "distflow.sqlite3"
    away = cli.folder / "away"
    store.rename(away)
    # A supervisor that has the old file open would never read the new one.
    refused = cli.run("workflow", "adopt")
    assert (refused.code, "a supervisor is still using it" in refused.err) == (5, True)
    away.rename(store)
    cli.kill_supervisor()
    store.write_bytes(b"no longer a database" * 1000)
    for ending in ("-wal", "-shm"):
        (cli.state / f"{store.name}{ending}").unlink(missing_ok=True)
    shutil.rmtree(cli.state / "logs")
    broken = cli.run("workflow", "list")
    assert (broken.code, "is damaged" in broken.err, "workflow adopt" in broken.err) == (5, True, True)

    would = cli.run("workflow", "adopt", "--dry-run")
    assert (would.code, "would be renamed" in would.err) == (0, True)
    assert store.read_bytes().startswith(b"no longer a database")
    done = cli.run("workflow", "adopt")
    assert done.code == 0, done.err
    assert done.out == "waits-1: adopted\nfails-1: adopted\n"
    (aside,) = cli.state.glob("distflow.sqlite3.broken-*")
    assert str(aside) in done.err
    assert aside.read_bytes().startswith(b"no longer a database")
    cli.await_status(fails, "FAILED")
    cli.await_log(fails, "[one] it breaks")
    cli.await_running(runs)
    assert cli.run("workflow", "cancel", runs, "--wait", "60").code == 0
    assert cli.tasks(runs)["one"]["status"] == "FAILED_CANCELED"


def test_no_task_starts_twice_when_two_machines_watch_one_workflow(cli: Cli) -> None:
    go, other = cli.folder / "go", on_another_machine(cli)
    completes = cli.submit(cli.spec(STAGES.replace("GO", str(go)).replace("CODE", "0")))
    fails = STAGES.replace("GO", str(go)).replace("CODE", "7").replace("name: stages", "name: again")
    again = cli.submit(cli.spec(fails))
    for workflow in (completes, again):
        cli.await_log(workflow, "up")
    workflows = {one["name"]: one for one in adopt(other)}
    assert workflows[completes]["adopted"], workflows
    assert "had not been started when the workflow was adopted" in workflows[completes]["notes"][1]
    assert any("this machine does not retry a group" in note for note in workflows[again]["notes"])
    for workflow in (completes, again):
        wait_until(lambda w=workflow: other.tasks(w)["first"]["status"] == "RUNNING", 30)  # type: ignore[misc]
        assert other.tasks(workflow)["second"]["status"] == "FAILED_UPSTREAM"
    go.touch()
    assert cli.await_status(completes, "COMPLETED")["groups"][1]["tasks"][0]["status"] == "COMPLETED"
    other.await_status(completes, "FAILED")
    assert other.tasks(completes)["first"]["status"] == "COMPLETED"
    # The first machine starts the next attempt. The other machine has only seen the first attempt fail.
    wait_until(lambda: cli.tasks(again)["first"]["retry_id"] > 0, 60)
    other.await_status(again, "FAILED")
    assert other.tasks(again)["first"]["exit_code"] == 7
    assert cli.run("workflow", "cancel", again, "--wait", "60").code == 0
    # A restart runs the group that never started, with the output of the first group.
    restarted = other.run("workflow", "restart", completes)
    assert restarted.code == 0, restarted.err
    other.await_status(restarted.out.strip(), "COMPLETED")
    other.await_log(restarted.out.strip(), "[second] second")
    wait_until(lambda: other.supervisor() is None, 30)
    assert [one for one in attempts(cli) if one.endswith("second/0")] == ["second-group/second/0"] * 2


def test_a_gang_is_adopted_from_all_of_its_nodes(lab: Lab) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    gang = lab.submit(go)
    tasks = cli.await_running(gang)
    cli.kill_supervisor()
    shutil.rmtree(cli.state)
    assert [one["name"] for one in adopt(cli)] == [gang]
    adopted = cli.await_running(gang)
    assert {name: (one["node_name"], one["pid"], one["ranks"]) for name, one in adopted.items()} == {
        name: (one["node_name"], one["pid"], one["ranks"]) for name, one in tasks.items()
    }
    lab.cli.await_log(gang, "offset", 2)
    go.touch()
    cli.await_status(gang, "COMPLETED")


def test_a_record_changed_on_its_node_is_not_adopted_and_writes_no_files(cli: Cli) -> None:
    go, other, home = cli.folder / "go", on_another_machine(cli), cli.folder / "home"
    spec = WAITS.replace("GO", str(go)) + f"    outputs: [{{url: 'file://{cli.folder}/wanted'}}]\n"
    runs = cli.submit(cli.spec(spec.replace("echo first", "echo secret > {{output}}/x; echo first")))
    cli.await_running(runs)
    cli.kill_supervisor()
    for name in ("distflow.sqlite3", "distflow.sqlite3-wal", "distflow.sqlite3-shm"):
        (cli.state / name).unlink(missing_ok=True)
    (note,) = cli.root.rglob("workflow.json")
    signed = note.read_text()
    note.write_text(signed.replace(f"{cli.folder}/wanted", str(home)))
    for one in (cli, other):
        (workflow,) = adopt(one)
        assert (workflow["name"], workflow["adopted"]) == (runs, False)
        assert (
            f"is not signed with the key of this state directory, and its outputs would go to file://{home}" in workflow["why"]
        )
    # The unchanged record has this state directory's signature, so it is trusted although the store is gone.
    note.write_text(signed)
    (workflow,) = adopt(cli)
    assert (workflow["adopted"], workflow["notes"]) == (True, [])
    (workflow,) = adopt(other, "--trust-records")
    assert workflow["adopted"]
    assert (
        f"not signed with the key of this state directory; its outputs go to file://{cli.folder}/wanted" in workflow["notes"][0]
    )
    go.touch()
    for one in (cli, other):
        one.await_status(runs, "COMPLETED")
    assert not home.exists()
    assert (cli.folder / "wanted" / "x").read_text() == "secret\n"
