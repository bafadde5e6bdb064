"""``distflow workflow export``: scripts for Slurm as in ``goldens/slurm``, and specs for OSMO as in ``goldens/osmo_export``.

``tests/scenarios/test_export.py`` runs such scripts on a real Slurm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from distflow.cli.app import run
from distflow.documents.problems import errors_of
from distflow.documents.yaml_parser import parse_yaml
from distflow.errors import SecretsMissing
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.ranks import TaskRanks
from distflow.plan.compile import compile_plan
from distflow.spec.files import LIBRARY, Bundle
from distflow.spec.parse import load_spec_text
from distflow.spec.template import render
from language import osmo_keys, used_keys

GOLDENS = Path(__file__).parents[2] / "goldens" / "slurm"
OSMO = GOLDENS.parent / "osmo_export"
SPECS = sorted(path for path in GOLDENS.glob("*.yaml") if path.name != "distflow.yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTFLOW_CONFIG", str(GOLDENS / "distflow.yaml"))
    return tmp_path


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert run(["workflow", "export", *arguments]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    return shown.out, shown.err


def one_task(**keys: object) -> str:
    task = {"name": "only", "command": ["true"], **keys}
    Path("spec.yaml").write_text(json.dumps({"workflow": {"name": "one", "tasks": [task]}}))
    return "spec.yaml"


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_slurm_scripts_match_their_goldens(
    spec: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if spec.stem == "shapes":
        monkeypatch.delenv("DISTFLOW_CONFIG")
    out, err = exported(capsys, str(spec), "--to", "slurm")
    found = out + "".join(f"\n# stderr: {line}" for line in err.replace(f"{spec.parent}/", "").splitlines())
    golden = spec.with_suffix(".sh")
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found)
    assert found == golden.read_text()
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)


def test_a_script_is_written_to_a_file_with_its_large_files_next_to_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "big.bin").write_bytes(os.urandom(2 << 20))
    (folder / "small.bin").write_bytes(b"\0\1")
    spec = one_task(files=[{"path": "big.bin", "localpath": "big.bin"}, {"path": "small.bin", "localpath": "small.bin"}])
    assert run(["workflow", "export", spec, "--to", "slurm"]) == 2
    assert (
        "the files of the spec have 2.0 MiB in total, and a script can contain at most 1 MiB\nadd `--output FILE`"
        in capsys.readouterr().err
    )
    out, _ = exported(capsys, spec, "--to", "slurm", "--output", "job/one.sbatch")
    assert out == "wrote job/one.sbatch\nwrote job/one.sbatch.files/big.bin\n"
    assert (folder / "job/one.sbatch.files/big.bin").read_bytes() == (folder / "big.bin").read_bytes()
    script = (folder / "job/one.sbatch").read_text()
    assert 'cp "${FILES_DIR:-$SLURM_SUBMIT_DIR/one.sbatch.files}"/big.bin "$run_dir"/files/big.bin || exit' in script
    assert 'base64 -d > "$run_dir"/files/small.bin' in script
    assert "#   FILES_DIR  the directory of the files that are too large for the script." in script
    assert "#              one.sbatch.files in the current directory.\n" in script
    assert run(["workflow", "export", spec, "--to", "slurm", "--output", "job/one.sbatch"]) == 2
    assert "`job/one.sbatch` exists already" in capsys.readouterr().err
    (folder / "job/one.sbatch").unlink()
    assert run(["workflow", "export", spec, "--to", "slurm", "--output", "job/one.sbatch"]) == 2
    assert "`job/one.sbatch.files/big.bin` exists already" in capsys.readouterr().err
    exported(capsys, spec, "--to", "slurm", "--output", "job/one.sbatch", "--force")


def test_text_that_looks_like_a_placeholder_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = one_task(command=["sed", "s/@@VERSION@@/1/", "a.txt"])
    out, _ = exported(capsys, spec, "--to", "slurm")
    assert "sed 's/@@VERSION@@/1/' a.txt" in out or "sed s/@@VERSION@@/1/ a.txt" in out


def test_secrets_are_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = exported(capsys, one_task(), "--to", "slurm", "--set-env", "TOKEN=hunter2", "--format-type", "json")
    document = json.loads(out)
    assert "hunter2" not in out + err
    assert ': "${TOKEN:?must be set: a secret of --set-env}"' in document["text"]
    assert [one["message"] for one in document["warnings"]] == ["only: secrets are not in the script"]
    assert (document["to"], document["files"]) == ("slurm", [])
    out, err = exported(capsys, one_task(image="i"), "--to", "osmo", "--set-env", "TOKEN=hunter2")
    assert "hunter2" not in out + err
    warning = "warning: the exported spec does not contain the secrets of `--set-env`\n"
    assert f"{warning}    pass them to `osmo workflow submit --set-env`" in err


def test_missing_secrets_of_a_workflow_are_named_with_their_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*_: object, **__: object) -> None:
        raise SecretsMissing("train-3", ["TOKEN", "KEY"])

    monkeypatch.setattr("distflow.cli.workflow.export.export_to_slurm", export)
    assert run(["workflow", "export", "train-3", "--to", "slurm"]) == 2
    message, hint, _ = capsys.readouterr().err.split("\n")
    assert "secrets of train-3 again: TOKEN, KEY. " in message
    assert hint == "use --set-env TOKEN=… --set-env KEY=…"


def test_settings_of_nodes_and_containers_of_pyxis_are_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    spec = one_task(image="registry.example/team/train:3", volumeMounts=["/data:/mnt"])
    options = ("--pool", "containers", "--python", "/opt/venv/bin/python", "--setup", "module load a", "--env", "A=b c")
    out, _ = exported(capsys, spec, "--to", "slurm", *options)
    assert (
        "srun --kill-on-bad-exit=1 --label --container-image='registry.example#team/train:3' "
        '--container-mounts="$run_dir:$run_dir",/data:/mnt bash "$run_dir/only-group.task.sh"'
    ) in out
    assert "export A='b c'\n" in out
    assert 'export PATH=/opt/venv/bin:"$PATH"\nmodule load a\n' in out
    tasks = [{"name": "a", "lead": True, "command": ["true"], "image": "i"}, {"name": "b", "command": ["true"]}]
    Path("spec.yaml").write_text(json.dumps({"workflow": {"name": "one", "groups": [{"name": "g", "tasks": tasks}]}}))
    assert run(["workflow", "export", "spec.yaml", "--to", "slurm", "--pool", "containers"]) == 2
    assert (
        "error: only some tasks of group `g` have an `image`, but one `srun` starts all tasks of the group\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "slurm", "--pool", "nowhere"), "there is no pool `nowhere`"),
        (("--to", "cloud"), "`cloud` is not one of"),
        ((), "--to"),
    ],
)
def test_wrong_options_are_errors(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", one_task(), *arguments]) in (2, 4)
    assert message in capsys.readouterr().err


def test_a_pool_without_slurm_options_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISTFLOW_CONFIG")
    assert run(["workflow", "export", one_task(), "--to", "slurm", "--pool", "local"]) == 2
    assert "the pool `local` has `backend: local`, not `slurm`" in capsys.readouterr().err


def test_debug_of_a_group_without_ranks_is_exported_to_osmo(capsys: pytest.CaptureFixture[str]) -> None:
    group = {"name": "g", "debug": True, "tasks": [{"name": "a", "image": "i", "command": ["true"]}]}
    Path("spec.yaml").write_text(json.dumps({"workflow": {"name": "one", "groups": [group]}}))
    out, _ = exported(capsys, "spec.yaml", "--to", "osmo")
    assert "TORCH_DISTRIBUTED_DEBUG: DETAIL" in out


def test_a_helper_gets_the_numbers_of_its_world_in_osmo(capsys: pytest.CaptureFixture[str]) -> None:
    master = {"name": "m", "image": "i", "lead": True, "ranks": {"size": 2}, "command": ["python3", "train.py"]}
    helper = {"name": "h", "image": "i", "command": ["python3", "watch.py", "{{world_size}}", "{{num_nodes}}"]}
    group = {"name": "g", "tasks": [master, helper]}
    Path("spec.yaml").write_text(json.dumps({"workflow": {"name": "one", "groups": [group]}}))
    out, _ = exported(capsys, "spec.yaml", "--to", "osmo")
    assert command_words(out, Path())[-3:] == ["watch.py", "2", "1"]


@pytest.mark.parametrize("name", ["task_dir", "address_only"])
def test_a_spec_cannot_set_a_variable_that_the_script_uses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", one_task(environment={name: "x"}), "--to", "slurm"]) == 2
    assert f"task `only` sets the variable `{name}`, which the script itself uses" in capsys.readouterr().err
    assert run(["workflow", "export", one_task(), "--to", "slurm", "--set-env", f"{name}=x"]) == 2
    assert f"task `only` sets the variable `{name}`, which the script itself uses" in capsys.readouterr().err


def test_programs_for_valohai_cause_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "two", "groups": [{"name": "g", "tasks": [
        {"name": "a", "lead": True, "ranks": {"size": 1}, "command": ["python3", "-c", "import valohai"]},
        {"name": "b", "ranks": {"size": 1}, "command": ["true"]},
    ]}]}  # fmt: skip
    Path("two.yaml").write_text(json.dumps({"workflow": spec}))
    out, err = exported(capsys, "two.yaml", "--to", "slurm")
    assert "`distributed.json` of Valohai is not written" in err
    assert "VH_" not in out.replace("the variables VH_*", "")


# -- OSMO -------------------------------------------------------------------------------------------------------------


def foreign_keys(text: str) -> set[str]:
    """Return the keys of a spec that OSMO does not have."""
    document = parse_yaml(render(text, "spec.yaml").text, "spec.yaml").value
    return {key for key in used_keys(document) - osmo_keys() if not key.startswith("task.exitActions.")}


def command_words(text: str, folder: Path) -> list[str]:
    """Return the words of all commands that distflow would run for a spec, with the port and address as OSMO has them."""
    spec, _ = load_spec_text(text, "spec.yaml", folder)
    keys = {file.bundle for group in spec.groups for task in group.tasks for file in task.files} | {LIBRARY}
    bundles = dict.fromkeys(keys, Bundle(digest="0" * 64, size=1, mode=0o700, is_tar=True))
    plan = compile_plan(spec, check_layout(spec)[0], pool="lab", bundles=bundles)
    words = [word for group in plan.groups for launch in group.launches for word in launch.argv]
    return [re.sub("@@ADDRESS:(node-0|first)@@", "@@MASTER_ADDR@@", word.replace("@@MASTER_PORT@@", "29500")) for word in words]


def layout_of(text: str, folder: Path) -> dict[str, tuple[TaskRanks, ...]]:
    """Return the ranks of each group of a spec."""
    worlds, problems = check_layout(load_spec_text(text, "spec.yaml", folder)[0])
    assert not errors_of(problems)
    return {name: world.tasks for name, world in worlds.items()}


@pytest.mark.parametrize("spec", sorted(OSMO.glob("*.yaml")), ids=lambda path: path.stem)
def test_osmo_specs_match_their_goldens(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = exported(capsys, str(spec), "--to", "osmo")
    golden = spec.with_suffix(".txt")
    found = out + "".join(f"\n# stderr: {line}" for line in err.replace(f"{spec.parent}/", "").splitlines())
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found)
    assert found == golden.read_text()
    assert foreign_keys(out) == set()


@pytest.mark.parametrize(
    "name", ["hello_world", "pytorch_dist", "pytorch_dist_3", "pytorch_replicas", "pytorch_torchrun", "resume"]
)
def test_samples_for_osmo_have_osmos_keys_and_the_same_ranks(
    name: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository / "workflow_specs"
    text = (folder / f"{name}.yaml").read_text()
    out, err = exported(capsys, str(folder / f"{name}.yaml"), "--to", "osmo")
    assert foreign_keys(out) == set()
    assert "OSMO requires an `image`" in err
    if name != "hello_world":  # distflow does not search the environment for its ranks
        assert layout_of(out, folder) == layout_of(text, folder)
    # A template that needs only small changes is kept.
    assert ("default-values:" in out) is (name in ("pytorch_dist", "pytorch_torchrun"))
    assert exported(capsys, str(folder / f"{name}.yaml"), "--to", "osmo", "--set", f"{SETS[name]}")[0] != out


SETS = {"hello_world": "greeting=Ahoy"} | dict.fromkeys(
    ("pytorch_dist", "pytorch_dist_3", "pytorch_replicas", "pytorch_torchrun", "resume"), "epochs=2"
)


@pytest.mark.parametrize(
    "name", ["combination", "environment", "exec_timeout", "files", "labels", "serial", "template", "topology"]
)
def test_specs_written_for_osmo_are_exported_unchanged(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = GOLDENS.parent / "osmo" / f"{name}.yaml"
    out, _ = exported(capsys, str(spec), "--to", "osmo")
    heading, text = out[: -len(spec.read_text())], out[-len(spec.read_text()) :]
    assert text == spec.read_text()
    assert all(line.startswith("#") for line in heading.splitlines())


def test_a_spec_exported_to_osmo_has_the_commands_that_distflow_runs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = OSMO / "launcher.yaml"
    out, _ = exported(capsys, str(spec), "--to", "osmo")
    expected = command_words(spec.read_text(), spec.parent)
    assert "torch.distributed.run" in expected
    assert "{% y {#" in expected
    # The hostfile of DeepSpeed is a file of the task in OSMO.
    expected = [word.replace("@@ATTEMPT_DIR@@/config", "@@ATTEMPT_DIR@@/files/tmp/distflow/config") for word in expected]
    assert command_words(out, spec.parent) == expected


@pytest.mark.parametrize("option", [("--pool", "cluster"), ("--env", "A=b"), ("--setup", "true")])
def test_options_of_slurm_are_refused_for_osmo(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", one_task(), "--to", "osmo", *option]) == 2
    assert f"{option[0]} has no effect on a spec for OSMO" in capsys.readouterr().err
