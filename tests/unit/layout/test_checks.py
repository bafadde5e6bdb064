"""Properties of the layout check: correct layouts pass in any order, and each single mistake is found and named."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distflow.documents.problems import Problem, errors_of
from distflow.layout.checks.group_checks import check_layout
from distflow.spec.model import GroupSpec, Ranks, TaskSpec
from distflow.structs import replace
from unit.layout.layout_specs import flags, spec, task

Numbers = list[dict[str, int]]
SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=7)


def layout(sizes: list[int]) -> Numbers:
    """Return the correct claims of tasks with these sizes, one after the other."""
    rows, cursor = [], 0
    for size in sizes:
        rows.append({"offset": cursor, "size": size, "world_size": sum(sizes)})
        cursor += size
    return rows


def tasks(rows: Numbers) -> list[TaskSpec]:
    return [
        task(f"t{index}", *flags(row["offset"], row["size"], row["world_size"]), lead=row["offset"] == 0)
        for index, row in enumerate(rows)
    ]


def errors(members: list[TaskSpec]) -> tuple[Problem, ...]:
    return errors_of(check_layout(spec(members))[1])


def apply_hints(problems: tuple[Problem, ...], rows: Numbers, members: list[TaskSpec]) -> Numbers:
    """Return the claims with the changes that the first line of each hint proposes."""
    fixed = [dict(row) for row in rows]
    for problem in problems:
        words = problem.hint.splitlines()[0].split()
        key, value = words[1].removeprefix("--"), int(words[2])
        (index,) = [at for at, item in enumerate(members) if problem.where in {word.mark for word in item.command}]
        fixed[index][key] = value
    return fixed


@given(SIZES, st.randoms())
def test_any_partition_passes_in_any_order(sizes: list[int], random: object) -> None:
    members = tasks(layout(sizes))
    random.shuffle(members)  # type: ignore[attr-defined]
    worlds, problems = check_layout(spec(members))
    assert problems == ()
    assert worlds["g"].world_size == sum(sizes)
    assert [item.size for item in worlds["g"].tasks] == sizes


@given(SIZES, st.randoms())
def test_tasks_with_only_sizes_are_laid_out_in_order_with_the_lead_first(sizes: list[int], random: object) -> None:
    lead = random.randrange(len(sizes))  # type: ignore[attr-defined]
    members = [task(f"t{index}", "true", lead=index == lead, ranks=Ranks(size=size)) for index, size in enumerate(sizes)]
    worlds, problems = check_layout(spec(members))
    assert problems == ()
    order = [f"t{lead}", *(f"t{index}" for index in range(len(sizes)) if index != lead)]
    assert [item.task for item in worlds["g"].tasks] == order


@settings(max_examples=150)
@given(SIZES, st.data())
def test_any_wrong_number_is_found_and_named(sizes: list[int], data: st.DataObject) -> None:
    rows = layout(sizes)
    index = data.draw(st.integers(0, len(rows) - 1))
    key = data.draw(st.sampled_from(["offset", "size", "world_size"]))
    by = data.draw(st.integers(-20, 20).filter(bool))
    rows[index][key] += by
    members = tasks(rows)
    if not any(row["offset"] == 0 for row in rows):
        members[0] = task("t0", *flags(*rows[0].values()), lead=True)
    found = errors(members)
    assert found
    assert len(found) <= 1
    named = "\n".join(problem.message + problem.hint for problem in found)
    named += "".join(str(problem.where.line) for problem in found)
    assert f"t{index}" in named or str(members[index].command[0].mark.line) in named


@settings(max_examples=150)
@given(SIZES, st.data())
def test_the_first_remedy_fixes_a_wrong_offset_or_world_size(sizes: list[int], data: st.DataObject) -> None:
    rows = layout(sizes)
    index = data.draw(st.integers(1, len(rows) - 1))
    key = data.draw(st.sampled_from(["offset", "world_size"]))
    rows[index][key] += data.draw(st.integers(1, 20))
    members = tasks(rows)
    found = errors(members)
    assert len(found) == 1
    fixed = apply_hints(found, rows, members)
    # If two tasks have the same size, the hint may change either of them.
    starts = sorted((row["offset"], row["size"]) for row in fixed)
    assert [start for start, _ in starts] == [sum(size for _, size in starts[:at]) for at in range(len(starts))]
    assert {row["world_size"] for row in fixed} == {sum(sizes)}


@given(st.lists(st.integers(1, 9), min_size=3, max_size=7), st.data())
def test_a_dropped_task_is_found(sizes: list[int], data: st.DataObject) -> None:
    rows = layout(sizes)
    dropped = rows.pop(data.draw(st.integers(1, len(rows) - 1)))
    found = errors(tasks(rows))
    assert len(found) == 1
    assert f"--offset {dropped['offset']} --size {dropped['size']}" in found[0].hint


@given(SIZES, st.integers(1, 9))
def test_each_task_that_keeps_the_old_world_size_is_reported_when_a_task_is_added(sizes: list[int], more: int) -> None:
    rows = layout(sizes)
    rows.append({"offset": sum(sizes), "size": more, "world_size": sum(sizes) + more})
    members = tasks(rows)
    found = errors(members)
    assert len(found) == len(sizes)
    assert sum(bool(problem.drawing) for problem in found) == 1
    assert apply_hints(found, rows, members) == layout([*sizes, more])


@given(SIZES, st.data())
def test_torchrun_node_ranks_must_be_consecutive(sizes: list[int], data: st.DataObject) -> None:
    ranks = list(range(len(sizes)))
    index = data.draw(st.integers(0, len(sizes) - 1))
    wrong = data.draw(st.integers(0, len(sizes) + 3))

    def members() -> list[TaskSpec]:
        return [
            task(
                f"t{at}",
                *f"torchrun --nnodes {len(sizes)} --node_rank {rank} --nproc_per_node {size} train.py".split(),
                lead=at == 0,
            )
            for at, (rank, size) in enumerate(zip(ranks, sizes, strict=True))
        ]

    assert errors(members()) == ()
    assume(wrong != index)
    ranks[index] = wrong
    found = errors(members())
    assert len(found) == 1
    assert f"node rank {wrong}" in found[0].message or f"node_rank {wrong}" in found[0].hint


def test_node_ranks_are_checked_after_an_option_with_a_shell_expansion() -> None:
    options = "--nnodes=$NNODES --nproc_per_node=8 --node_rank=0 --master_addr=$MASTER_ADDR"
    for script in (f"torchrun {options} train.py", f'OPTIONS="{options}"; torchrun $OPTIONS train.py'):
        (found,) = errors([task(name, "bash", "-c", script, lead=name == "a") for name in ("a", "b")])
        assert "b: --node_rank=0 is also used by a" in found.message


@pytest.mark.parametrize(
    ("nnodes", "node_rank", "words"),
    [
        (2, 10**12, f"w: --node_rank {10**12} is too high"),
        (10**12, 1, f"w has --nnodes {10**12}, but no task has node rank 2, 3, 4 and {10**12 - 5} more"),
        (5, 1, "w has --nnodes 5, but no task has node rank 2, 3 and 4"),
        (6, 1, "w has --nnodes 6, but no task has node rank 2, 3, 4 and 1 more"),
    ],
)
def test_a_wrong_number_of_nodes_or_node_rank_has_a_short_message(nnodes: int, node_rank: int, words: str) -> None:
    ranks = {"m": 0, "w": node_rank}
    tasks = [
        task(name, *f"torchrun --nnodes {nnodes} --node_rank {rank} --nproc_per_node 8 train.py".split(), lead=not rank)
        for name, rank in ranks.items()
    ]
    (found,) = errors(tasks)
    assert words in found.message


@pytest.mark.parametrize("mistake", [{"offset": 3}, {"size": 7}, {"world_size": 99}, {}])
def test_a_thousand_tasks_are_checked_within_a_minute(mistake: dict[str, int]) -> None:
    rows = layout([8] * 1000)
    rows[500] |= mistake
    began = time.perf_counter()
    assert bool(errors(tasks(rows))) == bool(mistake)
    assert time.perf_counter() - began < 60


def test_the_hint_moves_a_wrong_offset_with_the_tasks_that_follow_it() -> None:
    sizes = [Ranks(offset=4, size=4), Ranks(size=4), Ranks(offset=0, size=4), Ranks(size=4)]
    (problem,) = errors([task(f"t{index}", "true", lead=index == 0, ranks=ranks) for index, ranks in enumerate(sizes)])
    assert problem.message == "t0: ranks 4-7 are claimed by t0 and t3"
    assert problem.hint.splitlines()[1:] == [f"{problem.where} t0: write offset: 8 instead of offset: 4"]


@pytest.mark.parametrize(
    ("sizes", "hint"),
    [
        ((4, 4), "give t1 ranks 0-3 and t0 ranks 4-7"),
        ((2, 1), "give t1 rank 0 and t0 ranks 1-2"),
        ((1, 2, 1), "give t2 rank 0 and t0 rank 3"),
        ((1, 2, 3), "give t2 rank 0 and t0 later ranks"),
    ],
)
def test_the_hint_gives_rank_0_to_the_lead(sizes: tuple[int, ...], hint: str) -> None:
    ranks = [Ranks(offset=sum(sizes[:index]), size=size) for index, size in enumerate(sizes)]
    last = len(sizes) - 1
    (problem,) = errors([task(f"t{index}", "true", lead=index == last, ranks=one) for index, one in enumerate(ranks)])
    assert problem.hint == f"move `lead: true` to t0, or {hint}"


def test_a_lone_task_without_a_world_size_gets_the_hint_about_groups() -> None:
    first = task("a", "true", lead=True, ranks=Ranks(size=8))
    second = task("b", "true", lead=True, ranks=Ranks(offset=8, size=8))
    whole = spec([first])
    groups = (*whole.groups, GroupSpec(name="h", tasks=(second,)))
    (problem,) = errors_of(check_layout(replace(whole, groups=groups))[1])
    assert problem.message == "b holds ranks 8-15, but it is the only task of its group"
    assert problem.hint == "tasks share a world only within a group: put b and a under one `groups:` entry"


def test_the_hint_for_replicas_with_the_same_rank_is_a_token() -> None:
    program = task("worker", "python3", "train.py", "--rank", "0", "--world-size", "2")
    (problem,) = errors([replace(program, name=f"worker-{number}", replica=number, lead=not number) for number in range(2)])
    assert problem.message == "--rank 0 gives the same rank to all replicas: worker-0 and worker-1"
    assert problem.hint == "write --rank {{node_rank}}"  # no program reads PET_NODE_RANK, except torchrun
