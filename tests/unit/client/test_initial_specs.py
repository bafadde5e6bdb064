"""``distflow init``: from scripts for Slurm, from torchrun's command lines, from answers, and from samples.

``goldens/sbatch`` has a script of each common form, and next to it the expected spec.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from distflow.cli.app import run
from distflow.client.spec_drafts.initial_specs import draft_from_torchrun, list_samples
from distflow.client.spec_drafts.sbatch import draft_sbatch
from distflow.documents.problems import Mark, errors_of
from distflow.errors import InputError
from distflow.layout.checks.group_checks import check_layout
from distflow.spec.parse import load_spec
from distflow.structs import replace

CONFIGURATION = """\
default_pool: small
pools:
  small:
    backend: ssh
    nodes: [{name: gpu1, host: gpu1, gpus: 8}]
  large:
    backend: ssh
    nodes: [{name: big1, host: big1, gpus: 4}, {name: big2, host: big2, gpus: 4}, {name: big3, host: big3}]
"""
SCRIPTS = sorted((Path(__file__).parents[2] / "goldens" / "sbatch").glob("*.sbatch"))


class Keyboard(io.StringIO):
    """The input of a user on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").touch()
    monkeypatch.chdir(made)
    monkeypatch.setenv("DISTFLOW_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DISTFLOW_CONFIG", str(tmp_path / "distflow.yaml"))
    (tmp_path / "distflow.yaml").write_text(CONFIGURATION)
    return made


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_for_slurm_becomes_a_valid_spec(script: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / script.name).write_text(script.read_text())
    assert run(["init", "job", "--from-sbatch", script.name]) == 0
    assert "wrote job.yaml" in capsys.readouterr().out
    found, golden = (folder / "job.yaml").read_text(), script.with_suffix(".yaml")
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found)
    assert found == golden.read_text()
    assert not errors_of(load_spec("job.yaml")[1])


def test_run_and_init_translate_a_script_in_the_same_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = next(path for path in SCRIPTS if path.stem == "gres")
    assert run(["run", "--from-sbatch", str(script), "--print-spec"]) == 0
    printed = capsys.readouterr().out.partition("workflow:\n")[2]
    assert run(["init", "work", "--from-sbatch", str(script)]) == 0
    assert "  name: train\n" in printed
    assert (
        printed.replace("  name: train\n", "  name: work\n") == (folder / "work.yaml").read_text().partition("workflow:\n")[2]
    )


@pytest.mark.parametrize("options", [[], ["--set", "size=4"]])
def test_an_exported_script_becomes_a_spec_of_the_same_layout(
    folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "first.yaml").write_text(
        "workflow:\n  name: first\n  timeout: {exec_timeout: 90m}\n  resources:\n    default: {gpu: 8, cpu: 16, memory: 64G}\n"
        "  groups:\n  - name: training\n    launcher: torchrun\n    tasks:\n    - name: node\n      replicas: 3\n"
        "      ranks: {size: {{size}}}\n      command: [python3, train.py, --lr, '0.1']\n      output_dir: outputs\n"
        "      environment: {NCCL_DEBUG: WARN}\n      files:\n      - {path: ., localpath: .}\ndefault-values: {size: 8}\n"
    )
    export = ["workflow", "export", "first.yaml", "--to", "slurm", "--output", "first.sbatch", "--setup", "module load cuda"]
    assert run([*export, *options]) == 0
    assert run(["init", "second", "--from-sbatch", "first.sbatch"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert notes == [
        "note: line 13: `#SBATCH --output=%x-%j.log`: `distflow workflow logs` shows the output",
        "note: the spec does not prepare the nodes, so each submit needs --setup 'module load cuda'",
    ]
    sets = [(options[1].partition("=")[0], "4")] if options else []
    specs = [load_spec("first.yaml", sets=sets)[0], load_spec("second.yaml")[0]]
    worlds = [check_layout(spec)[0]["training"] for spec in specs]
    assert worlds[0].tasks == worlds[1].tasks
    first, second = (spec.groups[0] for spec in specs)
    assert first.timeouts == second.timeouts
    for one, other in zip(first.tasks, second.tasks, strict=True):
        assert [word.value for word in one.command] == [word.value for word in other.command]
        assert {name: text.value for name, text in other.environment.items()} == {"NCCL_DEBUG": "WARN"}
        assert (one.launcher.kind, one.output_dir) == (other.launcher.kind, other.output_dir)
    assert replace(specs[0].resources["default"], mark=Mark("")) == replace(specs[1].resources["default"], mark=Mark(""))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("90", "90m"), ("12:30", "750s"), ("1:00:00", "1h"), ("00:30:00", "30m"), ("2-00", "48h"), ("1-12:30", "2190m"),
        ("0", ""), ("UNLIMITED", ""),
    ],
)  # fmt: skip
def test_time_limits_of_slurm_become_durations(folder: Path, value: str, expected: str) -> None:
    assert draft_sbatch(f"#SBATCH --time={value}\npython train.py\n", folder=folder).exec_timeout == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("gpu:0", 0), ("gpu", 1), ("gpu:a100", 1), ("gpu:a100:4", 4), ("lustre", None)]
)
def test_the_number_of_gpus_is_read_from_gres(folder: Path, value: str, expected: int | None) -> None:
    assert draft_sbatch(f"#SBATCH --gres={value}\npython train.py\n", folder=folder).gpus == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#SBATCH -N 2\necho hello\n", "no training command was found"),
        ("", "no training command was found"),
        ("#SBATCH --job-name='open\npython train.py\n", "line 1 has a quote that is not closed"),
        ("#SBATCH --nodes=2 \\\npython train.py\n", "line 1 has a backslash at the end"),
    ],
)
def test_scripts_that_cannot_be_translated_are_errors(folder: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        draft_sbatch(text, folder=folder)


@pytest.mark.parametrize(
    ("lines", "command"),
    [
        ("bash train.sh --lr 1", ("bash", "train.sh", "--lr", "1")),
        ("module load cuda\nsh -e ./run.sh", ("sh", "-e", "./run.sh")),
        ("bash setup.sh\npython train.py", ("python", "train.py")),
        ("srun --version\nbash setup.sh\npython train.py", ("python", "train.py")),
        ("bash -o pipefail train.sh -s 5 -", ("bash", "-o", "pipefail", "train.sh", "-s", "5", "-")),
        ("cat > node.sh <<END\ntorchrun train.py\nEND\nbash node.sh", ("python3", "train.py")),
    ],
)
def test_a_script_that_a_shell_runs_is_the_command_if_there_is_no_other(
    folder: Path, lines: str, command: tuple[str, ...]
) -> None:
    draft = draft_sbatch(f"#SBATCH -N 2\n{lines}\n", folder=folder)
    assert draft.command == command
    assert all(line not in note for note in draft.notes for line in ("bash node.sh", "bash train.sh", "run.sh"))
    assert any("`bash setup.sh`: only one command is translated" in note for note in draft.notes) is ("setup.sh" in lines)


@pytest.mark.parametrize(
    "line", ["bash -c 'echo hello'", "bash -s < commands", "bash", "bash - <<END\npwd\nEND", "bash -o pipefail"]
)
def test_a_shell_without_a_script_file_is_not_a_training_command(folder: Path, line: str) -> None:
    with pytest.raises(InputError, match="no training command was found"):
        draft_sbatch(f"{line}\n", folder=folder)


@pytest.mark.parametrize(
    "line",
    [
        "srun python -m torch.distributed.run --nproc_per_node=2 train.py",
        "srun -u python3 -u -m torch.distributed.launch --nproc_per_node 2 train.py",
        "srun --export ALL bash -lc 'OMP_NUM_THREADS=4 python -m torch.distributed.run --nproc-per-node 2 train.py'",
        "srun env OMP_NUM_THREADS=4 torchrun --nproc_per_node 2 train.py",
    ],
)
def test_options_of_torchrun_are_found_in_commands_of_srun(folder: Path, line: str) -> None:
    draft = draft_sbatch(f"#SBATCH -N 2 -J fine:tune\n{line}\n", folder=folder)
    assert (draft.nodes, draft.ranks, draft.command, draft.launcher) == (2, 2, ("python3", "train.py"), "torchrun")
    assert draft.name == "fine-tune"
    assert draft.environment == ({"OMP_NUM_THREADS": "4"} if "OMP" in line else {})


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("srun python -O -m torch.distributed.run --nproc_per_node 2 train.py", "options of torchrun in the command are not"),
        ("srun apptainer exec my.sif torchrun --nproc_per_node 2 train.py", "options of torchrun in the command are not"),
        ("srun bash -c 'cd sub; torchrun train.py'", "line 2: `cd sub`: only one command is translated"),
        ("srun bash -c '. env/bin/activate; torchrun train.py'", "--setup '. env/bin/activate'"),
        ("srun env -u A B=1 torchrun train.py", "options of torchrun in the command are not"),
        ("srun env A=$B torchrun train.py", "line 2: `A=$B`: only a shell can compute this value"),
        ("torchrun --nproc_per_node $SLURM_GPUS_ON_NODE train.py", "`--nproc_per_node $SLURM_GPUS_ON_NODE` is not known"),
    ],
)
def test_untranslated_parts_become_notes(folder: Path, line: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.sh").write_text(f"#SBATCH -N 2\n{line}\n")
    assert run(["init", "job", "--from-sbatch", "job.sh"]) == 0
    assert note in capsys.readouterr().err


def test_torchruns_command_line_becomes_a_spec(folder: Path) -> None:
    draft = draft_from_torchrun("OMP_NUM_THREADS=4 torchrun --nnodes 2 --nproc_per_node=gpu absent.py --x")
    assert (draft.nodes, draft.ranks, draft.environment) == (2, None, {"OMP_NUM_THREADS": "4"})
    assert draft.notes == ("the script `absent.py` does not exist in the project",)
    for line, message in (("python train.py", "does not run torchrun"), ("torchrun 'x", "not closed")):
        with pytest.raises(InputError, match=message):
            draft_from_torchrun(line)


def test_nproc_per_node_gpu_becomes_the_number_of_gpus_of_the_default_pool(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["init", "--force", "--from-torchrun", "torchrun --nproc_per_node gpu train.py"]
    assert run(command) == 0
    assert "note:" not in capsys.readouterr().err
    assert "ranks: {size: 8}" in (folder / "train.yaml").read_text()
    assert run([*command, "--nodes", "2"]) == 0
    assert "note: the number of processes of `--nproc_per_node gpu` is not known" in capsys.readouterr().err


def test_questions_appear_only_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init"]) == 2
    assert "error: there is no command for the spec" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Keyboard("\nmany\n0\n2\n8\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["init"]) == 0
    prompts = capsys.readouterr().err
    asked = "Number of nodes [1]: "
    refused = f"{asked}Write a whole number, 1 or more.\n"
    assert f"Command for each node [train.py]: {refused}{refused}{asked}GPUs of each node [0]: " in prompts
    group = load_spec("train.yaml")[0].groups[0]
    assert [(task.name, task.launcher.kind) for task in group.tasks] == [("node-0", "torchrun"), ("node-1", "torchrun")]
    monkeypatch.setattr(sys, "stdin", Keyboard(""))
    assert run(["init", "other"]) == 2
    assert not (folder / "other.yaml").exists()


@pytest.mark.parametrize(
    ("options", "pool_option"),
    [
        (["--gpus", "8"], ""),
        (["--nodes", "3", "--gpus", "4"], " --pool large"),
        (["--nodes", "2", "--gpus", "8"], " --hostfile hosts.txt"),
    ],
)
def test_the_shown_command_has_the_options_that_the_job_needs(
    folder: Path, options: list[str], pool_option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", "deep/my job", "--command", "train.py", *options]) == 0
    assert capsys.readouterr().err == f"Run it: distflow submit 'deep/my job.yaml'{pool_option} --wait\n"
    assert f"# Run it: distflow submit 'my job.yaml'{pool_option} --wait\n" in Path("deep/my job.yaml").read_text()
    assert load_spec("deep/my job.yaml")[0].name == "my-job"


def test_an_existing_file_is_replaced_only_with_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "deep/job.yaml", "--command", "train.py", "--gpus", "2", "-t", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": ["deep/job.yaml"], "notes": []}
    assert load_spec("deep/job.yaml")[0].name == "job"
    assert load_spec("deep/job.yaml")[0].groups[0].tasks[0].files[0].local_path == str(folder)
    before = Path("deep/job.yaml").read_text()
    again = ["init", "deep/job", "--command", "train.py", "--nodes", "3"]
    assert run(again) == 2
    assert "error: `deep/job.yaml` exists already\nchoose another name, or add --force" in capsys.readouterr().err
    assert Path("deep/job.yaml").read_text() == before
    assert run([*again, "--force"]) == 0
    assert "replicas: 3" in Path("deep/job.yaml").read_text()
    assert run(["init", "--command", "train.py", "--sample", "resume"]) == 2
    capsys.readouterr()
    for command, expected in (("train.py '", "a quote that is not closed"), ("train.py \\", "a backslash at the end")):
        assert run(["init", "--command", command]) == 2
        assert capsys.readouterr().err.startswith(f"error: --command has {expected}\nwrite it as in a shell: ")


@pytest.mark.parametrize("option", ["--nodes", "--gpus", "--nproc-per-node"])
def test_options_for_numbers_cannot_be_combined_with_a_sample(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", "--sample", "resume", option, "2"]) == 2
    assert capsys.readouterr().err == f"error: --sample and {option} cannot be combined\nremove one of them\n"
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize("name", [sample.name for sample in list_samples()])
def test_a_sample_is_copied_with_its_scripts(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--sample", name]) == 0
    spec, *others = (line.removeprefix("wrote ") for line in capsys.readouterr().out.splitlines())
    assert others[-1] == "workflow.schema.json"
    assert not errors_of(load_spec(spec)[1])
    assert "workflow_specs" not in Path(spec).read_text()
    assert run(["init", "--sample", name]) == 2
    assert run(["init", "--sample", f"{name}s", "mine"]) == 2
    assert f"did you mean `{name}`?" in capsys.readouterr().err


def test_samples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--list-samples"]) == 0
    assert "hello-world       The smallest gang" in capsys.readouterr().out
    assert run(["init", "--list-samples", "-t", "json"]) == 0
    files = {one["name"]: one["files"] for one in json.loads(capsys.readouterr().out)["samples"]}
    assert files["hello-world"] == ["hello_world.yaml"]
