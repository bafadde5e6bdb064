"""Valid specs: the meaning of each key, the defaults of missing keys, and the published schema."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound, Severity
from distflow.documents.schema import load_schema
from distflow.spec.model import GroupSpec, TaskSpec, Timeouts, WorkflowSpec
from distflow.spec.parse import load_spec, load_spec_text, schema_text
from distflow.train.strategies.options import KINDS

TUTORIAL = """\
default-values:
  workers: 1
  platform: cpu
version: 2
workflow:
  name: pytorch-dist
  pool: lab
  timeout: {exec_timeout: 2h, queue_timeout: 0}
  resources:
    default: {cpu: "8", gpu: 2.0, memory: 30Gi, storage: 1Ti, platform: {{platform}}, nodesExcluded: [n7, 8]}
  groups:
  - name: training
    ignoreNonleadStatus: false
    timeout: {exec_timeout: 90s}
    tasks:
    - name: master
      lead: true
      image: pytorch
      command: [bash]
      args: [/tmp/entry.sh, 5, on, {{ workers }}]
      environment: {FLAG: yes, N: 010, EMPTY: "", F: 1.50}
      files:
      - path: /tmp/entry.sh
        contents: |
          # entry
          python3 /train.py --host {{host:worker-0}} --out {{ output }}
      - {path: bin, contents: AAEC, base64: true}
    - name: worker
      command: [echo]
      replicas: {{ workers + 1 }}
      ranks: {size: 8}
"""


def loaded(text: str, base_dir: Path = Path("/nowhere"), **options: list[tuple[str, str]]) -> WorkflowSpec:
    return load_spec_text(text, "f.yaml", base_dir, sets=options.get("sets", ()))[0]


def only_task(keys: str, base_dir: Path = Path("/nowhere")) -> TaskSpec:
    spec = loaded(f"workflow:\n  name: job\n  tasks:\n  - name: a\n    command: [echo]\n    {keys}\n", base_dir)
    return spec.groups[0].tasks[0]


def test_a_spec_like_that_of_the_tutorial_is_parsed() -> None:
    spec = loaded(TUTORIAL)
    assert (spec.name, spec.pool, spec.file, spec.mark.line) == ("pytorch-dist", "lab", "f.yaml", 6)
    default = spec.resources["default"]
    assert (default.cpu, default.gpu, default.memory, default.storage) == (8, 2, 30 << 30, 1 << 40)
    assert (default.platform, default.nodes_excluded) == ("cpu", ("n7", "8"))
    (group,) = spec.groups
    assert (group.name, group.barrier, group.ignore_nonlead_status, group.lead.name) == ("training", True, False, "master")
    assert group.timeouts == Timeouts(exec_s=90.0, queue_s=None)
    assert [task.name for task in group.tasks] == ["master", "worker-0", "worker-1"]
    assert [(task.written_name, task.replica, task.lead) for task in group.tasks] == [
        ("master", None, True),
        ("worker", 0, False),
        ("worker", 1, False),
    ]


def test_scalars_of_a_task_become_texts_as_written() -> None:
    master = loaded(TUTORIAL).groups[0].tasks[0]
    assert [text.value for text in master.args] == ["/tmp/entry.sh", "5", "on", "1"]
    assert {name: text.value for name, text in master.environment.items()} == {
        "FLAG": "yes",
        "N": "010",
        "EMPTY": "",
        "F": "1.50",
    }


def test_each_line_of_a_script_has_its_line_in_the_spec() -> None:
    entry, binary = loaded(TUTORIAL).groups[0].tasks[0].files
    assert entry.contents is not None
    assert entry.contents.value == "# entry\npython3 /train.py --host {{host:worker-0}} --out {{output}}\n"
    assert entry.contents.mark_at(entry.contents.value.index("--out")).line == 26
    assert (binary.contents, binary.data) == (None, b"\0\1\2")


def test_ranks_have_the_lines_of_their_keys() -> None:
    ranks = loaded(TUTORIAL).groups[0].tasks[1].ranks
    assert ranks is not None
    assert (ranks.offset, ranks.size, ranks.world_size, ranks.mark.line, set(ranks.marks)) == (None, 8, None, 31, {"size"})


def test_the_rendered_text_keeps_its_lines() -> None:
    rendered = loaded(TUTORIAL).rendered.split("\n")
    assert rendered[:4] == ["", "", "", "version: 2"]
    assert rendered[29].strip() == "replicas: 2"


def test_inputs_make_their_group_wait_for_the_groups_that_they_name() -> None:
    tasks = """
workflow:
  name: j
  groups:
  - {name: prepare, tasks: [{name: crop, lead: true, command: [x]}, {name: label, command: [x], replicas: 2}]}
  - {name: fetch, tasks: [{name: get, command: [x]}]}
  - name: train
    tasks:
    - {name: a, lead: true, command: [x], inputs: [{task: get}, {task: label-1, regex: ".*[.]pt"}, {task: crop}]}
    - {name: b, command: [x]}
"""
    groups = loaded(tasks).groups
    assert [group.upstream for group in groups] == [(), (), ("prepare", "fetch")]
    inputs = [(one.position, one.task, one.regex) for one in groups[2].tasks[0].inputs]
    assert inputs == [(0, "get", ""), (1, "label-1", ".*[.]pt"), (2, "crop", "")]


def test_tasks_without_groups_wait_for_the_tasks_of_their_inputs() -> None:
    spec = loaded("workflow: {name: j, tasks: [{name: a, command: [x]}, {name: b, command: [x], inputs: [{task: a}]}]}")
    assert [(group.name, group.upstream) for group in spec.groups] == [("a-group", ()), ("b-group", ("a-group",))]


def test_each_task_without_a_group_gets_its_own_group() -> None:
    spec = loaded(
        "workflow: {name: j, timeout: {queue_timeout: 5m}, tasks: [{name: a, command: [x]}, {name: b, command: [x]}]}"
    )
    found = [(group.name, group.lead.name, group.timeouts.queue_s) for group in spec.groups]
    assert found == [("a-group", "a", 300.0), ("b-group", "b", 300.0)]


@pytest.mark.parametrize("lead", ["", ", lead: false", ", lead: true", ', lead: "true"'])
def test_a_task_alone_in_its_group_leads_it(lead: str) -> None:
    assert (
        loaded(f"workflow: {{name: j, groups: [{{name: g, tasks: [{{name: a, command: [x]{lead}}}]}}]}}").groups[0].lead.name
        == "a"
    )


def test_the_first_replica_leads_a_group_of_replicas() -> None:
    group = loaded("workflow: {name: j, groups: [{name: g, tasks: [{name: w, command: [x], replicas: 3}]}]}").groups[0]
    assert [(task.name, task.lead) for task in group.tasks] == [("w-0", True), ("w-1", False), ("w-2", False)]


def test_a_group_may_remove_the_timeout_of_the_workflow() -> None:
    group = "{name: g, timeout: {exec_timeout: 0}, tasks: [{name: a, command: [x]}]}"
    text = f"workflow: {{name: j, timeout: {{exec_timeout: 1h}}, groups: [{group}]}}"
    assert loaded(text).groups[0].timeouts.exec_s is None


def test_empty_tasks_next_to_groups_are_accepted_as_in_osmo() -> None:
    text = "workflow: {name: j, tasks: [], groups: [{name: g, tasks: [{name: a, command: [x]}]}]}"
    assert isinstance(loaded(text).groups[0], GroupSpec)


def test_a_spec_without_resources_requests_no_gpus() -> None:
    spec = loaded("workflow: {name: j, tasks: [{name: a, command: [x]}]}")
    assert spec.resources["default"].gpu is None


@pytest.mark.parametrize("version", ["2", '"2"', "2.0"])
def test_the_versions_of_osmo_are_accepted(version: str) -> None:
    assert loaded(f"version: {version}\nworkflow: {{name: j, tasks: [{{name: a, command: [x]}}]}}").name == "j"


def test_local_files_are_relative_to_the_spec_and_never_rendered(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "code" / "inner").mkdir(parents=True)
    (tmp_path / "code" / "train.py").write_text("{% this is { no template {{ }}")
    spec = tmp_path / "specs" / "s.yaml"
    spec.write_text(
        "workflow:\n  name: j\n  tasks:\n  - name: a\n    command: [x]\n    files:\n"
        "    - {path: /train.py, localpath: ../code/train.py}\n"
        "    - {path: code, localpath: ../code}\n"
        "    - {path: in/side, contents: x}\n"
    )
    found = load_spec(str(spec))[0].groups[0].tasks[0].files
    assert [(file.local_path, file.is_directory) for file in found] == [
        (str(tmp_path / "code" / "train.py"), False),
        (str(tmp_path / "code"), True),
        (None, False),
    ]


def test_a_file_may_be_put_into_a_directory_that_is_sent(tmp_path: Path) -> None:
    task = only_task(f"files: [{{path: d, localpath: {tmp_path}}}, {{path: d/x, contents: y}}]")
    assert len(task.files) == 2


def test_a_file_inside_another_file_is_refused() -> None:
    with pytest.raises(ProblemsFound, match="`d/x` is inside `d`, which is a file"):
        only_task("files: [{path: d/x, contents: y}, {path: d, contents: y}]")


def test_base64_of_a_local_file_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(base64.encodebytes(b"\0" * 100))
    assert only_task("files: [{path: b, localpath: b, base64: true}]", tmp_path).files[0].data == b"\0" * 100


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert only_task("files: [{path: a.py, localpath: ~/a.py}]").files[0].local_path == str(tmp_path / "a.py")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_local_file_without_read_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch(mode=0)
    with pytest.raises(ProblemsFound, match="permission denied"):
        only_task("files: [{path: a.py, localpath: a.py}]", tmp_path)


def test_destinations_of_outputs_are_described() -> None:
    assert only_task("outputs: [{url: s3://b/o}, {dataset: {name: m}}]").outputs == ("upload to s3://b/o", "store as dataset m")


def test_a_spec_with_warnings_can_be_used() -> None:
    spec, problems = load_spec_text("workflow: {name: j, tasks: [{name: a, cacheSize: 1Gi, command: [x]}]}", "f", Path("/"))
    assert spec.groups[0].tasks[0].name == "a"
    assert [problem.severity for problem in problems] == [Severity.WARNING]


def test_warnings_are_reported_with_errors() -> None:
    with pytest.raises(ProblemsFound) as caught:
        load_spec_text("workflow: {name: j, tasks: [{name: a, cacheSize: 1Gi, comand: [x]}]}", "f", Path("/"))
    assert {problem.severity for problem in caught.value.problems} == {Severity.WARNING, Severity.ERROR}


def test_names_of_secrets_are_kept_and_checked() -> None:
    text = "workflow: {name: j, tasks: [{name: a, command: [x]}]}"
    assert load_spec_text(text, "f", Path("/"), environment_names=["A", "B", "A"])[0].environment_names == ("A", "B")
    with pytest.raises(ProblemsFound, match=r"--set-env: error: `3x` is not a valid name"):
        load_spec_text(text, "f", Path("/"), environment_names=["3x"])


def test_invalid_names_of_secrets_are_reported_with_an_invalid_document() -> None:
    with pytest.raises(ProblemsFound) as caught:
        load_spec_text("a: [", "f", Path("/"), environment_names=["3x"])
    assert len(caught.value.problems) == 2


def test_a_spec_may_be_on_standard_input() -> None:
    text = "workflow: {name: j, tasks: [{name: a, command: [x]}]}"
    assert load_spec("-", stdin_text=text)[0].file == "-"
    with pytest.raises(ProblemsFound, match="-: error: the document is empty"):
        load_spec("-")


def test_a_problem_in_an_alias_is_reported_at_most_once_for_each_use() -> None:
    text = "workflow:\n  name: j\n  tasks:\n  - &a {name: a, command: [x], exitActions: {FAIL: x}}\n  - {<<: *a, name: b}\n"
    with pytest.raises(ProblemsFound) as caught:
        load_spec_text(text, "f", Path("/"))
    assert len(caught.value.problems) <= 2


# --- the published schema -------------------------------------------------------------------------------------------------


def mappings(rule: object) -> list[dict[str, object]]:
    """Return the schema and all schemas inside it."""
    if isinstance(rule, list):
        return [found for item in rule for found in mappings(item)]
    if not isinstance(rule, dict):
        return []
    return [rule, *(found for item in rule.values() for found in mappings(item))]


def test_the_schema_is_valid_and_its_mappings_define_additional_keys() -> None:
    import jsonschema

    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    closed = [rule for rule in mappings(schema) if isinstance(rule.get("properties"), dict) and "type" in rule]
    assert len(closed) >= 12
    assert all("additionalProperties" in rule for rule in closed)
    assert not any(
        "template" in str(rule) for rule in load_schema("distflow.spec", "workflow.schema.json")["$defs"]["count"].items()
    )


def test_editors_propose_the_kinds_of_strategies() -> None:
    kinds = load_schema("distflow.spec", "workflow.schema.json")["$defs"]["group"]["properties"]["strategy"]["properties"][
        "kind"
    ]
    assert sorted(kinds["examples"]) == sorted(KINDS)


def test_every_key_of_the_schema_is_described() -> None:
    schema = load_schema("distflow.spec", "workflow.schema.json")
    for rule in mappings(schema):
        properties = rule.get("properties")
        for name, key in properties.items() if isinstance(properties, dict) and "type" in rule else ():
            reference = str(key.get("$ref", "")).rpartition("/")[2]
            assert "description" in key or "description" in schema["$defs"].get(reference, {}), name


def test_distflows_own_keys_are_marked() -> None:
    definitions = load_schema("distflow.spec", "workflow.schema.json")["$defs"]
    marked = {
        (name, key)
        for name in ("group", "task", "ranks", "launcher", "elastic")
        for key, rule in definitions[name]["properties"].items()
        if rule.get("x-distflow")
    }
    assert marked == {
        ("group", "timeout"),
        ("group", "retry"),
        ("group", "launcher"),
        ("group", "framework"),
        ("group", "strategy"),
        ("group", "debug"),
        ("group", "stop_on_missing_ranks"),
        ("group", "elastic"),
        ("group", "shared"),
        ("elastic", "min"),
        ("elastic", "wait"),
        ("task", "launcher"),
        ("task", "output_dir"),
        ("launcher", "kind"),
        ("launcher", "max_restarts"),
        ("launcher", "numa"),
        ("task", "ranks"),
        ("task", "replicas"),
        *(("ranks", key) for key in ("offset", "size", "world_size")),
    }


NULLS = """\
default-values: {platform: a100}
workflow:
  name: job
  timeout: {exec_timeout: , queue_timeout: null, hang_timeout: ~}
  resources:
    default: {cpu: null, gpu: , memory: ~, storage: null, platform: {{platform}}}
  tasks:
  - {name: a, command: [echo]}
"""


def test_null_in_resources_and_timeouts_counts_as_missing() -> None:
    spec = loaded(NULLS, sets=[("platform", "")])
    resource = spec.resources["default"]
    assert (resource.cpu, resource.gpu, resource.memory, resource.storage, resource.platform) == (None,) * 5
    assert spec.groups[0].timeouts == Timeouts()


def test_null_in_ranks_is_refused() -> None:
    with pytest.raises(ProblemsFound, match=r"ranks.offset. is empty"):
        only_task("ranks: {offset: }")


def test_a_key_that_is_given_twice_with_equal_values_is_a_warning() -> None:
    text = "workflow:\n  name: job\n  tasks:\n  - name: a\n    command: [echo]\n    image: x\n    image: x\n"
    warnings = load_spec_text(text, "f.yaml", Path("/nowhere"))[1]
    assert [(str(one.where), one.path) for one in warnings if "given twice" in one.message] == [
        ("f.yaml:7", "workflow.tasks[0].image")
    ]
