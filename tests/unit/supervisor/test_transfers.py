"""Data at URLs: inputs are fetched before a group is queued, and outputs are written before it is COMPLETED."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import Download
from distflow.spec.model import DataSpec, Retry
from distflow.state.record import TransferRecord
from distflow.structs import replace
from distflow.supervisor.checkpoints import transfer_of
from distflow.supervisor.commands import TransferData, TransferEnded, TransferMoved
from distflow.supervisor.transfers import archives, is_needed
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

HANG = Behavior(seconds=float("inf"))
INPUTS = (DataSpec(position=0, url="s3://b/in"), DataSpec(position=1, url="s3://b/{{workflow_id}}", regex="a"))
OUTPUTS = (DataSpec(position=0, url="s3://b/out/{{workflow_id}}"),)


def driver_of(tasks: int = 1, behavior: Behavior | None = None, **settings: object) -> Driver:
    """A driver with a workflow of one group. By default, each task runs one second."""
    plan = group_plan("train", tasks, world=tasks > 1, gpus=0, **settings)  # type: ignore[arg-type]
    driver = Driver(workflow(plan), behavior=lambda _: behavior or Behavior(seconds=1))
    driver.settle()
    return driver


def end_transfer(driver: Driver, command: TransferData, *, is_relayed: bool = False, **outcome: object) -> None:
    """Report the end of a transfer to the supervisor."""
    one = driver.workflows[command.key.workflow]
    transfer = transfer_of(one.plan, one.record, command)
    done = TransferRecord(
        data=command.data, is_relayed=is_relayed, task=command.key.task, at=driver.clock.now(), url=transfer.label,
        regex=transfer.regex, **outcome,  # type: ignore[arg-type]
    )  # fmt: skip
    driver.observations.append(
        TransferEnded(at=driver.clock.now(), key=command.key, data=command.data, url=transfer.label, outcome=done)
    )
    driver.settle()


def source_of(driver: Driver) -> AttemptKey | None:
    """Return the attempt whose node executes the last transfer."""
    one = driver.workflows["u1"]
    return transfer_of(one.plan, one.record, driver.transfers.begun[-1]).source


def transfers(driver: Driver) -> list[tuple[str, str, str, str, str]]:
    """Return the data, task, URL, regular expression and digest of each transfer that has begun."""
    one = driver.workflows["u1"]
    found = [(command, transfer_of(one.plan, one.record, command)) for command in driver.transfers.begun]
    return [(str(command.data), command.key.task, transfer.url, transfer.regex, transfer.digest) for command, transfer in found]


def test_a_group_is_queued_when_its_inputs_are_fetched_and_all_tasks_get_them() -> None:
    driver = driver_of(2, url_inputs=INPUTS)
    # An input of two tasks is fetched once.
    assert transfers(driver) == [("fetch/0", "t0", "s3://b/in", "", ""), ("fetch/1", "t0", "s3://b/w-1", "a", "")]
    assert driver.group().state is State.WAITING
    assert driver.group().message == "checking inputs: s3://b/in, s3://b/w-1"
    end_transfer(driver, driver.transfers.begun[1], digest="d1", size=10, files=1, content=5)
    assert driver.group().state is State.WAITING
    end_transfer(driver, driver.transfers.begun[0], digest="d0", size=20, files=2, content=3000)
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.transfers.begun) == 2
    for task in ("t0", "t1"):
        files = driver.backend.launches[f"u1/train/{task}/0"].files
        assert [(one.path, one.blob, one.size, one.is_tar) for one in files] == [
            ("input/0", "d0", 20, True),
            ("input/1", "d1", 10, True),
        ]
    assert archives(driver.record()) == {"d0", "d1"}
    messages = [event.text for event in driver.events]
    assert messages[0] == "train: checking inputs: s3://b/in, s3://b/w-1"
    assert "t0: its input was fetched: s3://b/in: 2 files, 2.9 KiB" in messages


def test_datasets_at_one_url_are_separate_inputs() -> None:
    sets = tuple(DataSpec(position=number, url="s3://b/sets", dataset=name) for number, name in enumerate(("a", "b:2", "a")))
    driver = driver_of(url_inputs=sets)
    assert driver.group().message == "checking inputs: dataset a, dataset b:2"
    for command, digest in zip(list(driver.transfers.begun), ("d0", "d1"), strict=True):
        end_transfer(driver, command, digest=digest)
    driver.run()
    assert [one.blob for one in driver.backend.launches["u1/train/t0/0"].files] == ["d0", "d1", "d0"]


def test_input_that_nodes_can_fetch_is_looked_up_once_and_fetched_by_each() -> None:
    sets = (DataSpec(position=0, url="s3://b/{{workflow_id}}", regex="a"), DataSpec(position=1, url="s3://b/sets", dataset="m"))
    driver = driver_of(2, url_inputs=sets)
    end_transfer(driver, driver.transfers.begun[0], is_direct=True, files=2, content=3000)
    end_transfer(driver, driver.transfers.begun[1], is_direct=True, dataset="m:7", files=1)
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert [str(command.data) for command in driver.transfers.begun] == ["fetch/0", "fetch/1"]
    for task in ("t0", "t1"):
        launch = driver.backend.launches[f"u1/train/{task}/0"]
        assert launch.files == ()
        assert launch.downloads == (
            Download(number=0, path="input/0", url="s3://b/w-1", regex="a"),
            Download(number=1, path="input/1", url="s3://b/sets", dataset="m:7"),
        )
    messages = [event.text for event in driver.events]
    assert "t0: its input is fetched by its node: s3://b/w-1: 2 files, 2.9 KiB" in messages


def nodes_can_fetch(driver: Driver) -> list[bool]:
    """Return for each transfer, in order, whether nodes can fetch the input."""
    one = driver.workflows["u1"]
    return [transfer_of(one.plan, one.record, command).nodes_can_fetch for command in driver.transfers.begun]


def test_input_that_a_node_cannot_fetch_is_relayed() -> None:
    driver = driver_of(2, HANG, url_inputs=INPUTS[:1])
    driver.backend.bare_nodes = {"n1", "n2"}
    assert nodes_can_fetch(driver) == [True]
    end_transfer(driver, driver.transfers.begun[0], is_direct=True, files=1)
    # The group keeps its lease during the relay, and no task is prepared before the input is on this machine.
    assert [str(command.data) for command in driver.transfers.begun] == ["fetch/0", "fetch/0"]
    assert nodes_can_fetch(driver)[-1] is False
    assert driver.group().state is State.INITIALIZING
    driver.restart()
    driver.settle()
    assert nodes_can_fetch(driver)[-1] is False
    end_transfer(driver, driver.transfers.begun[-1], digest="d0", size=20, files=1)
    assert driver.group().state is State.RUNNING
    assert [one.blob for one in driver.backend.launches["u1/train/t1/0"].files] == ["d0"]
    messages = [event.text for event in driver.events]
    assert (
        len([text for text in messages if text.endswith("comes from s3://b/in through this machine: no credentials for it")])
        == 1
    )


def test_relay_extends_the_start_barrier_and_the_next_attempt_reuses_the_archive() -> None:
    actions = ExitActions(reschedule=((3, 3),))
    driver = driver_of(1, Behavior(seconds=1, exit_code=3), url_inputs=INPUTS[:1], exit_actions=actions, retry=Retry(limit=1))
    driver.backend.bare_nodes = {"n1"}
    end_transfer(driver, driver.transfers.begun[0], is_direct=True, files=1)
    assert driver.group().state is State.INITIALIZING
    for done in range(9):
        driver.clock.advance(driver.pool.start_barrier_s / 3)
        relay = driver.transfers.begun[1]
        driver.observations.append(
            TransferMoved(at=driver.clock.now(), key=relay.key, data=relay.data, url="s3://b/in", done=done, total=9)
        )
        driver.settle()
        assert driver.group().state is State.INITIALIZING
    end_transfer(driver, driver.transfers.begun[1], digest="d0", size=20, files=1)
    driver.run()
    assert [str(command.data) for command in driver.transfers.begun] == ["fetch/0", "fetch/0"]
    assert [one.blob for one in driver.backend.launches["u1/train/t0/1"].files] == ["d0"]


def test_input_of_a_smaller_world_is_fetched_although_its_first_task_is_left_out() -> None:
    whole = group_plan("train", 2, url_inputs=INPUTS[:1])
    # The spec names the worker before the master.
    plan = replace(
        whole, launches=whole.launches[::-1], smaller=(group_plan("train", 1, url_inputs=INPUTS[:1]),), smaller_after_s=1.0
    )
    driver = Driver(workflow(plan), on=pool(node("n1")), behavior=lambda _: Behavior(seconds=1))
    driver.settle()
    driver.backend.bare_nodes = {"n1"}
    end_transfer(driver, driver.transfers.begun[0], is_direct=True)
    driver.advance(1.0)
    assert (driver.group().state, driver.group().left_out) == (State.INITIALIZING, ("t1",))
    assert [(str(command.data), command.key.task) for command in driver.transfers.begun] == [
        ("fetch/0", "t1"),
        ("fetch/0", "t0"),
    ]
    end_transfer(driver, driver.transfers.begun[1], digest="d0", files=1)
    driver.run()
    assert driver.group().state is State.COMPLETED
    assert driver.backend.launches["u1/train/t0/0"].files[0].blob == "d0"


def test_failed_relay_fails_the_group() -> None:
    driver = driver_of(2, HANG, url_inputs=INPUTS[:1])
    driver.backend.bare_nodes = {"n2"}
    end_transfer(driver, driver.transfers.begun[0], is_direct=True, files=1)
    end_transfer(driver, driver.transfers.begun[1], error="s3://b/in: refused")
    driver.run()
    group = driver.group()
    assert (group.state, group.reason) == (State.FAILED, Reason.DATA)
    assert driver.backend.starts == []
    assert "an input cannot be fetched: s3://b/in: refused" in group.message


@pytest.mark.parametrize(("code", "attempts"), [(2010, 2), (2012, 1)])
def test_failed_input_is_retried_by_the_shown_exit_code(code: int, attempts: int) -> None:
    actions = ExitActions(reschedule=((code, code),))
    driver = driver_of(url_inputs=INPUTS[:1], exit_actions=actions, retry=Retry(limit=1))
    driver.backend.bare_nodes = {"n1"}
    end_transfer(driver, driver.transfers.begun[0], is_direct=True, files=1)
    end_transfer(driver, driver.transfers.begun[1], error="s3://b/in: refused")
    assert driver.group().attempts[-1].exit_code == 2010
    assert driver.group().attempt + 1 == attempts


def test_inputs_are_fetched_when_the_upstream_groups_have_completed() -> None:
    top = group_plan("top", 1, world=False, gpus=0)
    bottom = group_plan("bottom", 1, world=False, gpus=0, after=("top",), url_inputs=INPUTS[:1])
    driver = Driver(workflow(top, bottom), behavior=lambda _: Behavior(seconds=5))
    driver.settle()
    assert driver.transfers.begun == []
    driver.advance(5.0)
    assert [command.key.group for command in driver.transfers.begun] == ["bottom"]


def test_group_fails_before_its_start_if_an_input_cannot_be_fetched() -> None:
    driver = driver_of(url_inputs=INPUTS)
    end_transfer(driver, driver.transfers.begun[0], error="s3://b/in/x: refused")
    group = driver.group()
    assert (group.state, group.reason, group.status) == (State.FAILED, Reason.DATA, "FAILED")
    assert group.message == "t0: an input cannot be fetched: s3://b/in/x: refused"
    assert driver.record().reason is Reason.DATA
    assert driver.backend.starts == []
    # The other transfer is abandoned, and its outcome is ignored.
    assert not is_needed(driver.record(), driver.transfers.begun[1])
    end_transfer(driver, driver.transfers.begun[1], digest="d1")
    assert len(driver.group().transfer_results) == 1


def test_a_group_completes_when_its_output_is_written() -> None:
    driver = driver_of(url_outputs=OUTPUTS)
    driver.advance(1.0)
    assert transfers(driver) == [("write/0", "t0", "s3://b/out/w-1", "", "")]
    assert source_of(driver) == AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    assert driver.backend.collected == []
    assert driver.group().state is State.RUNNING
    assert driver.group().message == "all tasks have ended; writing outputs: s3://b/out/w-1"
    driver.clock.advance(7.0)
    end_transfer(driver, driver.transfers.begun[0], files=2, content=100)
    group = driver.group()
    assert (group.state, group.ended_at) == (State.COMPLETED, driver.clock.now())
    assert driver.events[-2].text.startswith("train: COMPLETED") or driver.events[-1].text.endswith("COMPLETED")
    assert any(event.text == "t0: its output is at s3://b/out/w-1: 2 files, 100 B" for event in driver.events)


def test_output_that_its_node_cannot_write_is_relayed() -> None:
    driver = driver_of(url_outputs=OUTPUTS)
    driver.advance(1.0)
    end_transfer(driver, driver.transfers.begun[0], is_relayed=True, error="n1: it has no s3fs")
    assert driver.backend.collected == ["u1/train/t0/0"]
    saved = driver.group().tasks[0].saved
    assert saved is not None
    assert transfers(driver)[-1] == ("write/0", "t0", "s3://b/out/w-1", "", saved.digest)
    assert source_of(driver) is None
    # The next supervisor has this information in the record, and does not report it again.
    driver.restart()
    driver.settle()
    assert transfers(driver)[-1][-1] == saved.digest
    end_transfer(driver, driver.transfers.begun[-1], files=1)
    assert driver.group().state is State.COMPLETED
    messages = [event.text for event in driver.events]
    assert messages.count("t0: its output goes to s3://b/out/w-1 through this machine: n1: it has no s3fs") == 1


@pytest.mark.parametrize("url", ["file:///out", "/out", "sftp://host/out"])
def test_output_url_that_depends_on_the_machine_is_written_by_this_machine(url: str) -> None:
    driver = driver_of(url_outputs=(DataSpec(position=0, url=url),))
    driver.advance(1.0)
    assert driver.backend.collected == ["u1/train/t0/0"]
    assert [str(command.data) for command in driver.transfers.begun] == ["write/0"]
    assert source_of(driver) is None
    end_transfer(driver, driver.transfers.begun[0], files=1)
    assert not any("through this machine" in event.text for event in driver.events)


def test_output_of_each_task_is_collected_once_if_this_machine_writes_it() -> None:
    plan = group_plan("train", 2, world=False, gpus=0, url_outputs=(*OUTPUTS, DataSpec(position=1, url="/out")))
    driver = Driver(workflow(plan), behavior=lambda key: Behavior(seconds=1, exit_code=0))
    driver.settle()
    driver.advance(1.0)
    assert sorted(driver.backend.collected) == ["u1/train/t0/0", "u1/train/t1/0"]
    assert sorted(str(command.data) for command in driver.transfers.begun) == ["write/0", "write/0", "write/1", "write/1"]


def test_unreachable_node_with_outputs_is_named_and_fails_the_group_after_node_lost_after() -> None:
    driver = driver_of(url_outputs=OUTPUTS)
    driver.advance(1.0)
    driver.backend.cut("n1")
    driver.settle()
    assert driver.group().message == "all tasks have ended; writing outputs: s3://b/out/w-1; n1 is unreachable: cut"
    # The transfer continues to wait for the node, and is not started again.
    driver.backend.heal("n1")
    driver.settle()
    assert len(driver.transfers.begun) == 1
    driver.backend.cut("n1")
    driver.settle()
    driver.advance(driver.pool.node_lost_after_s + 1)
    assert (driver.group().state, driver.group().reason) == (State.FAILED, Reason.NODE_LOST)
    assert not is_needed(driver.record(), driver.transfers.begun[0])


def test_failed_write_of_an_output_fails_the_group_with_the_reason() -> None:
    driver = driver_of(url_outputs=OUTPUTS)
    driver.advance(1.0)
    end_transfer(driver, driver.transfers.begun[0], error="s3://b/out/w-1/x: refused")
    assert (driver.group().state, driver.group().reason) == (State.FAILED, Reason.DATA)
    assert driver.cause().message == "its output cannot be written: s3://b/out/w-1/x: refused"
    assert driver.group().tasks[0].state is State.COMPLETED


@pytest.mark.parametrize("exit_code", [0, 3])
def test_only_tasks_that_completed_by_themselves_write_outputs(exit_code: int) -> None:
    def behave(key: AttemptKey) -> Behavior:
        return {"t0": Behavior(seconds=3, exit_code=exit_code), "t1": Behavior(seconds=1, exit_code=4)}.get(key.task, HANG)

    plan = group_plan("train", 3, world=False, gpus=0, ignore=True, url_outputs=OUTPUTS)
    driver = Driver(workflow(plan), behavior=behave)
    driver.settle()
    for _ in range(12):
        driver.advance(1.0)
    # t1 failed, and t2 was stopped when the lead completed.
    assert [command.key.task for command in driver.transfers.begun] == (["t0"] if exit_code == 0 else [])
    if exit_code:
        assert driver.group().state is State.FAILED


def test_next_supervisor_repeats_unfinished_transfers() -> None:
    driver = driver_of(url_inputs=INPUTS, url_outputs=OUTPUTS)
    end_transfer(driver, driver.transfers.begun[0], digest="d0", files=1)
    driver.restart()
    driver.settle()
    assert [str(command.data) for command in driver.transfers.begun] == ["fetch/0", "fetch/1", "fetch/1"]
    end_transfer(driver, driver.transfers.begun[-1], digest="d1", files=1)
    driver.advance(1.0)
    assert str(driver.transfers.begun[-1].data) == "write/0"
    driver.restart()
    driver.settle()
    assert [str(command.data) for command in driver.transfers.begun[3:]] == ["write/0", "write/0"]
    end_transfer(driver, driver.transfers.begun[-1], files=1)
    assert driver.group().state is State.COMPLETED
    # A late outcome of the first transfer is ignored.
    before = driver.record()
    end_transfer(driver, driver.transfers.begun[3], error="late")
    assert driver.record() == before


@pytest.mark.parametrize("phase", ["fetches", "writes"])
def test_cancel_ends_the_group_and_its_transfers(phase: str) -> None:
    driver = driver_of(url_inputs=INPUTS[:1], url_outputs=OUTPUTS)
    if phase == "writes":
        end_transfer(driver, driver.transfers.begun[0], digest="d0")
        driver.advance(1.0)
    command = driver.transfers.begun[-1]
    assert is_needed(driver.record(), command)
    driver.cancel()
    driver.settle()
    assert driver.group().state is State.CANCELED
    assert not is_needed(driver.record(), command)


def test_cancel_abandons_the_write_even_if_the_lead_has_ended_its_group() -> None:
    plan = group_plan("train", 2, world=False, gpus=0, url_outputs=OUTPUTS)
    driver = Driver(workflow(plan), behavior=lambda key: Behavior(seconds=1) if key.task == "t0" else HANG)
    driver.settle()
    driver.advance(1.0)
    assert driver.group().state is State.STOPPING
    (command,) = driver.transfers.begun
    driver.cancel()
    driver.settle()
    assert (driver.group().state, driver.group().message) == (State.CANCELED, "canceled by me")
    assert not is_needed(driver.record(), command)


def test_next_attempt_reuses_fetched_inputs() -> None:
    actions = ExitActions(reschedule=((3, 3),))
    driver = driver_of(
        behavior=Behavior(seconds=1, exit_code=3),
        url_inputs=INPUTS[:1],
        url_outputs=OUTPUTS,
        exit_actions=actions,
        retry=Retry(limit=1),
    )
    end_transfer(driver, driver.transfers.begun[0], digest="d0", files=1)
    driver.run()
    assert [str(command.data) for command in driver.transfers.begun] == ["fetch/0"]
    assert driver.backend.launches["u1/train/t0/1"].files[0].blob == "d0"
    assert driver.group().state is State.FAILED


def test_progress_of_a_transfer_is_in_the_task() -> None:
    driver = driver_of(url_inputs=INPUTS[:1], url_outputs=OUTPUTS)
    for url in ("s3://b/in", "s3://b/out/w-1"):
        command = driver.transfers.begun[-1]
        moved = TransferMoved(at=1.0, key=command.key, data=command.data, url=url, done=5, total=9, bytes_per_s=2.0)
        driver.observations.append(moved)
        driver.settle()
        group = driver.group()
        moving = group.current_transfer(group.tasks[0])
        assert moving is not None
        assert (moving.sent, moving.total, moving.url) == (5, 9, url)
        end_transfer(driver, command, digest="d0")
        assert driver.group().tasks[0].transfer is None
        driver.advance(1.0)


@pytest.mark.parametrize(
    ("op", "regex", "message"),
    [
        ("fetch/0", "x", "no file at s3://b/in matches `x`: the directory of its input is empty"),
        ("fetch/0", "", "there is no file at s3://b/in: the directory of its input is empty"),
        ("write/0", "", "nothing is written to s3://b/in: its output has no files"),
        ("write/0", "x", "nothing is written to s3://b/in: no output file matches `x`"),
    ],
)
def test_transfer_without_files_is_reported(op: str, regex: str, message: str) -> None:
    data = DataSpec(position=0, url="s3://b/in", regex=regex)
    is_input = op.startswith("fetch")
    driver = driver_of(url_inputs=(data,) if is_input else (), url_outputs=() if is_input else (data,))
    driver.advance(1.0)
    end_transfer(driver, driver.transfers.begun[0], digest="d")
    assert any(event.text == f"t0: {message}" for event in driver.events)
