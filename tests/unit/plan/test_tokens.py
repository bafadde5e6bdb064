"""The replacement of tokens by numbers and placeholders, and of the paths of injected files by their new paths."""

from __future__ import annotations

import pytest

from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.plan.tokens import paths_in_work, place_of, rewriter, uses_tmp
from distflow.spec.model import DataSpec, EarlierInput, InputSpec

MASTER = TaskRanks(task="master", offset=0, size=8, node_rank=0)
WORKER = TaskRanks(task="worker", offset=8, size=8, node_rank=1)
WORLD = WorldLayout(world_size=16, tasks=(MASTER, WORKER), style="ranks")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{host:master}}:{{master_port}}", "@@ADDRESS:master@@:@@MASTER_PORT@@"),
        ("{{ host:master }}", "@@ADDRESS:master@@"),
        ("--offset {{rank_offset}} --size {{rank_size}}", "--offset 8 --size 8"),
        ("{{world_size}} {{node_rank}} {{num_nodes}}", "16 1 2"),
        ("{{output}}/model", "@@ATTEMPT_DIR@@/output/model"),
        ("{{workflow_id}}", "@@WORKFLOW_ID@@"),
        ("{{nothing_known}}", "{{nothing_known}}"),
    ],
)
def test_each_token_is_replaced_by_its_value(text: str, expected: str) -> None:
    assert rewriter(WORKER, WORLD, [])(text) == expected


def test_a_task_without_ranks_gets_the_tokens_of_the_world() -> None:
    assert rewriter(None, WORLD, [])("{{world_size}} {{num_nodes}} {{rank_offset}}") == "16 2 {{rank_offset}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{input:1}}/model {{input:crop}}", "@@ATTEMPT_DIR@@/input/1/model @@ATTEMPT_DIR@@/input/1"),
        # If two entries name the same task, its name refers to the first one.
        ("{{input:2}}", "@@ATTEMPT_DIR@@/input/2"),
        ("{{input:0}} {{input:other}}", "{{input:0}} {{input:other}}"),
    ],
)
def test_tokens_name_inputs_by_position_or_by_task(text: str, expected: str) -> None:
    inputs = (InputSpec(position=1, task="crop"), InputSpec(position=2, task="crop", regex="a"))
    assert rewriter(None, None, [], inputs)(text) == expected


def test_tokens_name_inputs_of_earlier_workflows_by_their_task() -> None:
    earlier = (EarlierInput(position=0, workflow="train-7", task="prepare"), DataSpec(position=2, url="s3://b/x"))
    rewrite = rewriter(None, None, [], (InputSpec(position=1, task="prepare"),), earlier)
    assert rewrite("{{input:prepare}} {{input:1}} {{input:2}}") == " ".join(f"@@ATTEMPT_DIR@@/input/{i}" for i in range(3))


def test_the_token_of_an_unknown_host_is_kept() -> None:
    assert rewriter(None, None, [], hosts={"a"})("{{host:a}} {{host:b}}") == "@@ADDRESS:a@@ {{host:b}}"


@pytest.mark.parametrize(
    ("injected", "texts", "expected"),
    [
        (["a/b.sh", "./c.sh"], [], {"/a/b.sh", "/c.sh"}),
        (["/tmp/a.sh"], ["bash tmp/a.sh"], {"/tmp/a.sh"}),
        (["/tmp/a.sh"], ["bash ./tmp/a.sh"], {"/tmp/a.sh"}),
        (["/tmp/a.sh"], ["bash /tmp/a.sh x/tmp/a.sh tmp/a.sh.bak tmp/a.shx"], set()),
        (["/data/"], ["load the data", "--data=/data"], set()),
        (["./"], ["ls /. /x"], set()),
        (["/data/"], ["ls data/x"], {"/data"}),
        # These are two files, and each form names its own file.
        (["/a.sh", "a.sh"], ["bash a.sh; bash /a.sh"], set()),
    ],
)
def test_files_that_are_used_by_a_relative_path_are_put_into_the_working_directory(
    injected: list[str], texts: list[str], expected: set[str]
) -> None:
    found = paths_in_work([(path, path.endswith("/")) for path in injected], [("", text) for text in texts])
    assert set(found) == expected


def test_the_absolute_and_relative_form_of_a_path_are_one_file() -> None:
    texts = [("", "bash tmp/a.sh; cat /tmp/a.sh /conf/b.yaml conf/b.yaml"), ("conf/b.yaml", "conf/b.yaml")]
    in_work = paths_in_work([("/tmp/a.sh", False), ("conf/b.yaml", False)], texts)
    rewrite = rewriter(None, None, list(in_work.items()), in_work=in_work)
    work = "@@ATTEMPT_DIR@@/work"
    assert rewrite(texts[0][1]) == f"bash tmp/a.sh; cat {work}/tmp/a.sh {work}/conf/b.yaml conf/b.yaml"
    assert place_of("/tmp/a.sh", in_work) == "work/tmp/a.sh"
    assert place_of("conf/b.yaml", in_work) == "work/conf/b.yaml"
    assert place_of("/other", in_work) == "files/other"


def test_the_path_of_a_file_in_the_file_itself_is_ignored() -> None:
    assert paths_in_work([("/train.py", False)], [("/train.py", "usage: python3 train.py"), ("", "python3 /train.py")]) == {}


@pytest.mark.parametrize(("text", "expected"), [("echo > tmp/x", True), ("ls ./tmp/", True), ("ls /tmp/x a/tmp/ tmpx", False)])
def test_uses_of_a_relative_tmp_directory_are_found(text: str, expected: bool) -> None:
    assert uses_tmp([("", text)]) is expected


def test_rank_tokens_are_kept_without_a_world() -> None:
    assert rewriter(None, None, [])("{{rank_offset}} {{master_addr}}") == "{{rank_offset}} @@MASTER_ADDR@@"


FILES = [("/train.py", False), ("/tmp/entry.sh", False), ("/data", True), ("/data/train.py", False)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/train.py", "@@ATTEMPT_DIR@@/files/train.py"),
        ("python3 /train.py --x", "python3 @@ATTEMPT_DIR@@/files/train.py --x"),
        ("--script=/train.py", "--script=@@ATTEMPT_DIR@@/files/train.py"),
        ("'/train.py'", "'@@ATTEMPT_DIR@@/files/train.py'"),
        ("open(f'/train.py') rb\"/train.py\"", "open(f'@@ATTEMPT_DIR@@/files/train.py') rb\"@@ATTEMPT_DIR@@/files/train.py\""),
        ("copy(out + '/train.py', out +f\"/train.py\")", "copy(out + '/train.py', out +f\"/train.py\")"),
        ("cp x {{output}}/train.py", "cp x @@ATTEMPT_DIR@@/output/train.py"),
        ('$(pwd)/train.py ~/train.py ${A}/train.py "$A"/train.py', '$(pwd)/train.py ~/train.py ${A}/train.py "$A"/train.py'),
        ("/train.py.", "@@ATTEMPT_DIR@@/files/train.py."),
        # Other paths that only contain an injected path.
        ("/train.py.bak", "/train.py.bak"),
        ("/train.pyc", "/train.pyc"),
        ("/opt/train.py", "/opt/train.py"),
        ("./train.py", "./train.py"),
        ("s3://bucket/train.py", "s3://bucket/train.py"),
        ("/train.py/x", "/train.py/x"),
        # Paths inside an injected directory.
        ("ls /data /data/x.bin", "ls @@ATTEMPT_DIR@@/files/data @@ATTEMPT_DIR@@/files/data/x.bin"),
        ("/database /data-old", "/database /data-old"),
        ("/data/train.py", "@@ATTEMPT_DIR@@/files/data/train.py"),
    ],
)
def test_exactly_the_injected_paths_are_rewritten(text: str, expected: str) -> None:
    assert rewriter(None, None, FILES)(text) == expected


def test_directories_of_osmos_containers_become_directories_of_the_attempt() -> None:
    rewrite = rewriter(None, None, FILES)
    assert rewrite("ls /osmo/data/output /osmo/data/input/0/x 'a=/osmo/run/workspace'") == (
        "ls @@ATTEMPT_DIR@@/output @@ATTEMPT_DIR@@/input/0/x 'a=@@ATTEMPT_DIR@@/work'"
    )
    assert (
        rewrite("/osmo/data/outputs /osmo/usr/bin s3://b/osmo/data/output")
        == "/osmo/data/outputs /osmo/usr/bin s3://b/osmo/data/output"
    )
    assert rewrite(
        "ls /valohai/outputs/model.pt /valohai/config /valohai/repository /valohai/inputs/0; ls /valohai/outputs2"
    ) == (
        "ls @@ATTEMPT_DIR@@/output/model.pt @@ATTEMPT_DIR@@/config @@ATTEMPT_DIR@@/work @@ATTEMPT_DIR@@/input/0; "
        "ls /valohai/outputs2"
    )
    assert place_of("/osmo/data/output/a.txt") == "output/a.txt"
    assert place_of("/osmo/data") == "files/osmo/data"


def test_relative_files_are_put_into_the_working_directory() -> None:
    assert place_of("conf/a.yaml") == "work/conf/a.yaml"
    assert place_of("/tmp/a.sh") == "files/tmp/a.sh"
