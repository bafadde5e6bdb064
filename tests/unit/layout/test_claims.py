"""Commands and scripts that claim ranks, and text that only looks like a claim."""

from __future__ import annotations

import pytest

from distflow.layout.claims.task_claims import Known, read_claims
from distflow.spec.model import TaskSpec
from unit.layout.layout_specs import task

RANKS = {"offset": "8", "size": "4", "world_size": "16"}


def shell(script: str, **environment: str) -> TaskSpec:
    return task("t", "bash", "/tmp/run.sh", files={"/tmp/run.sh": script}, environment=environment)


def values(spec: TaskSpec) -> list[dict[str, str]]:
    return [{key: claim.value for key, claim in item.claims.items()} for item in read_claims(spec).invocations]


@pytest.mark.parametrize(
    "script",
    [
        "python3 train.py --offset 8 --size 4 --world_size 16",
        "python3 train.py --offset=8 --size=4 --world-size=16",
        "python3 train.py --offset \\\n  8 --size '4' \\\n --world_size \"16\"",
        "OMP_NUM_THREADS=1 nohup python3 train.py --offset 8 --size 4 --world_size 16 > log 2>&1 &",
        "cd /x && { python3 train.py --offset 8 --size 4 --world_size 16; } || exit 1",
        "if true; then python3 train.py --offset 8 --size 4 --world_size 16; fi",
        "O=8\nexport S=4\npython3 train.py --offset $O --size ${S} --world_size ${W:-16}",
        "bash -c 'python3 train.py --offset 8 --size 4 --world_size 16'",
        'O=8; bash -ec "python3 train.py --offset $O --size 4 --world_size 16"',
        "bash <<'E'\npython3 train.py --offset 8 --size 4 --world_size 16\nE",
        "python3 prepare.py --offset 0 --size 100\npython3 train.py --offset 8 --size 4 --world_size 16",
        "numactl -N 0 timeout 1h python3 train.py --offset 8 --size 4 --world_size 16",
    ],
)
def test_the_flags_of_a_program_are_read(script: str) -> None:
    assert values(shell(script)) == [RANKS]


@pytest.mark.parametrize(
    "script",
    [
        "# python3 train.py --offset 8 --size 4 --world_size 16",
        "sleep 1 # --offset 8 --size 4 --world_size 16",
        "echo python3 train.py --offset 8 --size 4 --world_size 16",
        "cat <<E\npython3 train.py --offset 8 --size 4 --world_size 16\nE",
        "cat > t.py <<-'END'\n\tparser.add_argument('--offset') # --size 4 --world_size 16\n\tEND",
        "echo 'python3 train.py --offset 8 --size 4'",
        "truncate --size 4 f",
        "python3 train.py --size 4",
        "which torchrun",
        "echo torchrun --nnodes 2 train.py",
        "pip install torchrun thing",
    ],
)
def test_text_that_only_looks_like_flags_is_not_a_claim(script: str) -> None:
    assert values(shell(script)) == []


def test_only_shell_scripts_that_are_mentioned_are_read() -> None:
    claim = "python3 train.py --offset 8 --size 4 --world_size 16"
    assert values(task("t", "bash", "/a.sh", files={"/a.sh": ". /b.sh", "/b.sh": claim})) == [RANKS]
    assert values(task("t", "bash", "/a.sh", files={"/a.sh": "true", "/b.sh": claim})) == []
    assert values(task("t", "python3", "/a.py", files={"/a.py": claim})) == []
    assert values(task("t", "/a", files={"/a": f"#!/usr/bin/env bash\n{claim}"})) == [RANKS]
    assert values(task("t", "bash", "/a", files={"/a": claim})) == [RANKS]


def test_the_words_of_a_command_are_read_without_a_shell() -> None:
    words = ("python3", "train.py", "--offset", "8", "--size=4", "--world-size", "16")
    assert values(task("t", *words)) == [RANKS]
    # No shell expands the variable.
    found = values(task("t", "python3", "train.py", "--size", "$O", "--world_size", "16", environment={"O": "8"}))
    assert found == [{"size": "$O", "world_size": "16"}]


def test_option_c_after_a_script_file_is_an_argument_of_the_script() -> None:
    flags = ("--offset", "8", "--size", "4", "--world_size", "16")
    assert values(task("t", "bash", "run.sh", "-c", "config.yaml", *flags)) == [RANKS]
    assert values(task("t", "bash", "-euo", "pipefail", "/opt/run.sh", "-c", "config.yaml", *flags)) == [RANKS]
    assert values(shell("bash run.sh -c config.yaml --offset 8 --size 4 --world_size 16")) == [RANKS]


@pytest.mark.parametrize(
    "options", [["-c"], ["-lc"], ["-ce"], ["-c", "-e"], ["-o", "pipefail", "-c"], ["-euo", "pipefail", "-c"], ["--norc", "-c"]]
)
def test_the_script_after_option_c_is_read_with_any_other_options(options: list[str]) -> None:
    script = "python3 train.py --offset 8 --size 4 --world_size 16"
    assert values(task("t", "env", "A=1", "/bin/bash", *options, script, "name", "-c", "x")) == [RANKS]
    assert values(task("t", "bash", "wrap.sh", "bash", *options, script)) == [RANKS]
    assert values(shell(f"bash $OPTIONS {' '.join(options)} '{script}'")) == [RANKS]


def test_a_variable_with_two_values_is_unknown() -> None:
    script = "O=0\nif x; then O=8; fi\npython3 train.py --offset $O --size 4 --world_size 16"
    claim = read_claims(shell(script)).invocations[0].claims["offset"]
    assert (claim.known, claim.value) == (Known.RUNTIME, "$O")


@pytest.mark.parametrize(
    "arithmetic", ["(( O = NODE_RANK << 2 ))", "((O+=4))", "for ((O=0; O < 8; O++)); do :; done", "((++O))"]
)
def test_a_variable_that_is_computed_is_unknown(arithmetic: str) -> None:
    script = f"O=0\n{arithmetic}\npython3 train.py --offset $O --size 4 --world_size 16"
    (found,) = read_claims(shell(script)).invocations
    assert found.claims["offset"].known is Known.RUNTIME


def test_a_comparison_is_not_an_assignment() -> None:
    script = "O=8\n(( O == 8 && O <= 9 && O != 3 )) && python3 train.py --offset $O --size 4 --world_size 16"
    assert values(shell(script)) == [RANKS]


def test_variables_come_from_the_environment_unless_a_loop_sets_them() -> None:
    script = "python3 train.py --offset $O --size 4 --world_size 16"
    assert values(shell(script, O="8")) == [RANKS]
    looped = read_claims(shell(f"for O in 1 2; do {script}; done")).invocations[0]
    assert looped.claims["offset"].known is Known.RUNTIME


@pytest.mark.parametrize("value", ["{{rank_offset}}", "{{ rank_offset }}", "$DISTFLOW_RANK_OFFSET", '"${NODE_RANK}"'])
def test_tokens_and_variables_of_distflow_are_computed_values(value: str) -> None:
    script = f"python3 train.py --offset {value} --size 4 --world_size 16"
    assert read_claims(shell(script)).invocations[0].claims["offset"].known is Known.COMPUTED


@pytest.mark.parametrize(
    "start",
    ["torchrun", "/opt/venv/bin/torchrun", "python3 -m torch.distributed.run", "python -u -m torch.distributed.launch"],
)
def test_torchruns_options_end_at_the_script(start: str) -> None:
    found = read_claims(shell(f"{start} --nnodes=2 --nproc-per-node 8 -m my.train --node_rank 7 --size 3 --offset 2"))
    (item,) = found.invocations
    assert (item.launcher, item.program) == ("torchrun", "my.train")
    assert {key: claim.value for key, claim in item.claims.items()} == {"nnodes": "2", "nproc_per_node": "8"}


@pytest.mark.parametrize(
    "option", ["--nnodes=$N", '"--master_addr=${MASTER_ADDR}"', "--rdzv_id=$(date +%s)", "--log-dir=/tmp/$USER"]
)
def test_torchruns_options_are_read_after_one_with_a_shell_expansion(option: str) -> None:
    (item,) = read_claims(shell(f"torchrun {option} --node_rank=1 --nproc_per_node=8 train.py --size 3")).invocations
    assert item.program == "train.py"
    assert (item.claims["node_rank"].value, item.claims["nproc_per_node"].value) == ("1", "8")
    assert "size" not in item.claims


@pytest.mark.parametrize(
    "script",
    [
        'ARGS="--nnodes 2 --node_rank=1"\ntorchrun $ARGS --nproc_per_node 8 train.py --size 3',
        'ARGS="--nnodes 2 --node_rank=1"\ntorchrun --nproc_per_node 8 ${ARGS} train.py --size 3',
        'RUN="python3 -m torch.distributed.run"; $RUN --nnodes 2 --node_rank=1 --nproc_per_node 8 train.py --size 3',
        "export ARGS='--nnodes 2 --node_rank=1 --nproc_per_node 8 train.py'; torchrun $ARGS --size 3",
    ],
)
def test_an_unquoted_variable_is_split_into_words(script: str) -> None:
    (item,) = read_claims(shell(script)).invocations
    assert item.program == "train.py"
    claims = {key: claim.value for key, claim in item.claims.items()}
    assert claims == {"nnodes": "2", "node_rank": "1", "nproc_per_node": "8"}


@pytest.mark.parametrize(
    "script",
    [
        'ARGS=(--nnodes 2 --node_rank=1)\ntorchrun "${ARGS[@]}" --nproc_per_node 8 train.py --size 3',
        "GPUS=8\nARGS=(\n  --nnodes 2  # nodes\n  --node_rank=1 --nproc_per_node $GPUS\n)\ntorchrun ${ARGS[@]} train.py",
        "ARGS=(--nnodes 2 --log_dir $LOGS --node_rank=1)\nARGS+=(--nproc_per_node 8)\ntorchrun ${ARGS[@]} train.py",
        'COMMAND=(torchrun --nnodes 2 --node_rank=1 --nproc_per_node 8 train.py "two words" $(date))\n"${COMMAND[@]}"',
    ],
)
def test_the_words_of_an_array_are_read(script: str) -> None:
    (item,) = read_claims(shell(script)).invocations
    assert item.program == "train.py"
    claims = {key: claim.value for key, claim in item.claims.items()}
    assert claims == {"nnodes": "2", "node_rank": "1", "nproc_per_node": "8"}


def test_an_unknown_part_of_an_array_stays_unknown() -> None:
    (item,) = read_claims(shell("A=(--nnodes 2 --node_rank $(hostname))\ntorchrun ${A[@]} train.py")).invocations
    assert (item.claims["nnodes"].value, item.claims["node_rank"].known) == ("2", Known.RUNTIME)


def test_an_array_with_two_values_is_unknown() -> None:
    script = "A=(--offset 0)\nif x; then A=(--offset 8); elif y; then A=(--offset 9); fi\nA+=(--lr 1)\n"
    assert values(shell(f"{script}python3 train.py --size 4 --world_size 16 ${{A[@]}}")) == [{"size": "4", "world_size": "16"}]


def test_flags_in_an_unquoted_variable_are_read() -> None:
    assert values(shell('FLAGS="--offset 8 --size 4"\npython3 train.py $FLAGS --world_size 16')) == [RANKS]
    # In quotes it is one word.
    assert values(shell('FLAGS="--offset 8 --size 4"\npython3 train.py "$FLAGS" --world_size 16')) == []


def test_settings_of_a_script_win_over_the_environment() -> None:
    found = read_claims(shell("export MASTER_ADDR=$(dig +short {{host:m}})", MASTER_ADDR="x", MASTER_PORT="29500"))
    assert [(claim.key, claim.text) for claim in found.settings] == [
        ("master_addr", "MASTER_ADDR=$(dig +short {{host:m}})"),
        ("master_port", "MASTER_PORT: 29500"),
    ]


def test_each_claim_has_its_line() -> None:
    spec = shell("set -e\npython3 train.py \\\n  --offset 8 \\\n  --size 4 --world_size 16")
    first = spec.files[0].contents
    assert first is not None
    lines = {key: claim.where.line - first.mark.line for key, claim in read_claims(spec).invocations[0].claims.items()}
    assert lines == {"offset": 2, "size": 3, "world_size": 3}
