"""The name of the distribution, the contents of the wheel, the GitHub action, and the files for contributors."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest
import yaml

from distflow import __version__

ROOT = Path(__file__).resolve().parent.parent
OTHER_PROJECT = re.compile(
    r"\bdistflow\[|\b(?:pipx?|uvx?)\b[^\n|#`]*?\b(?:install|add|run|inject)\b[^\n|#`]*?[ '\"]distflow(?=[\s'\"`=<>~,;)]|$)"
)
"""`distflow` on PyPI belongs to another project. distflow's distribution is `distflow-cli`."""


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("pip install distflow", True),
        (".venv/bin/python -m pip install --upgrade 'distflow'", True),
        ("uv tool install distflow==0.2", True),
        ("pipx install distflow\n", True),
        ("uv add distflow", True),
        ("pip install 'distflow[data]'", True),
        ("write distflow[data] into requirements.txt", True),
        ("pip install 'distflow-cli[data]'", False),
        ("pipx install distflow-cli", False),
        ("pip install . && distflow --version", False),
        ("pip install /srv/distflow/", False),
    ],
)
def test_the_pattern_finds_the_other_project(text: str, *, is_wrong: bool) -> None:
    assert bool(OTHER_PROJECT.search(text.replace(" && ", "\n"))) is is_wrong


def test_no_text_installs_the_other_project() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = [ROOT / name for name in listed.stdout.splitlines()] or [
        path for path in ROOT.rglob("*") if ".venv" not in path.parts
    ]
    wrong = []
    for file in files:
        if file == Path(__file__) or not file.is_file() or file.suffix in (".png", ".gz", ".whl"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        wrong += [f"{file.relative_to(ROOT)}: {found.group()}" for found in OTHER_PROJECT.finditer(text)]
    assert len(files) > 100
    assert not wrong


def test_samples_are_complete() -> None:
    folder = resources.files("distflow") / "samples"
    specs = [one for one in folder.iterdir() if one.name.endswith(".yaml")]
    assert {"hello_world.yaml", "pytorch_dist.yaml"} <= {one.name for one in specs}
    for spec in specs:
        text = spec.read_text(encoding="utf-8")
        schema = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
        assert schema is not None, spec.name
        for name in [schema[1], *re.findall(r"localpath: (\S+)", text)]:
            assert (folder / name).is_file(), f"{spec.name}: {name} is not among the samples"


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is missing: run make")
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("distflow_cli-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert "\nName: distflow-cli\n" in metadata.read_text(encoding="utf-8")
    wanted = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "distflow").rglob("*.*") if path.suffix != ".pyc"}
    wanted |= {Path("distflow", "samples", path.name) for path in (ROOT / "workflow_specs").iterdir() if path.is_file()}
    missing = [str(path) for path in wanted if not (installed / path).exists()]
    assert not missing
    # The extracted wheel, not the checkout, is the first directory of the module path.
    program = (
        "import distflow, sys; assert distflow.__file__.startswith(sys.path[0]); from distflow.cli.entry import main; main()"
    )
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r}); sys.argv[0] = 'distflow'; {program}"]
    sample = installed / "distflow" / "samples" / "hello_world.yaml"
    done = subprocess.run(
        [*run, "workflow", "validate", str(sample)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "valid: 1 group, 2 tasks" in done.stdout, done.stderr
    done = subprocess.run([*run, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    version = re.search(r"^Version: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert done.stdout == f"distflow {version[1]}\n", done.stderr


def test_the_action_validates_and_submits(tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {
        "specs": "specs/*.yaml", "submit": "specs/hello_world.yaml", "arguments": "--set\ngreeting=Ahoy there\n\n",
        "junit": "report.xml",
    }  # fmt: skip
    assert set(inputs) | {"python-version"} == set(action["inputs"])
    (tmp_path / "distflow" / "bin").mkdir(parents=True)
    fake = tmp_path / "distflow" / "bin" / "distflow"
    fake.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    fake.chmod(0o755)
    shutil.copytree(
        ROOT / "workflow_specs", tmp_path / "specs", ignore=lambda _, names: {*names} - {"hello_world.yaml", "resume.yaml"}
    )
    printed = {}
    for step in action["runs"]["steps"]:
        if "if" not in step:
            continue
        environment = {name: inputs[re.findall(r"inputs\.([a-z-]+)", value)[0]] for name, value in step["env"].items()}
        # GitHub starts `shell: bash` with these options.
        printed[step["name"].partition(" ")[0]] = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=tmp_path, check=True, capture_output=True, text=True,
            env={"PATH": "/usr/bin:/bin", "RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "out"), **environment},
        ).stdout  # fmt: skip
    shown = {name: text.strip("<>").split("><") for name, text in printed.items()}
    assert shown == {
        "Validate": ["workflow", "validate", "specs/hello_world.yaml", "specs/resume.yaml", "--format-type", "github"],
        "Run": [
            "workflow", "submit", "specs/hello_world.yaml", "--wait", "--format-type", "github", "--junit", "report.xml",
            "--set", "greeting=Ahoy there",
        ],
    }  # fmt: skip
    assert (tmp_path / "out").read_text() == "junit=report.xml\n"


def test_the_files_for_contributors_are_valid() -> None:
    workflows = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").iterdir()}
    assert set(workflows) == {"ci.yml", "release.yml"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in (job for workflow in workflows.values() for job in workflow["jobs"].values()):
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for target in re.findall(r"^make ([a-z]+)$", step.get("run", ""), re.MULTILINE):
                assert f"\n{target}: $(STAMP)\n" in makefile
    for name in (".pre-commit-config.yaml", ".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"):
        assert yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]:
        program, *arguments = hook["entry"].split()
        assert program in (".venv/bin/ruff", ".venv/bin/python", ".venv/bin/distflow")
        assert all((ROOT / one).exists() for one in arguments if one.startswith("scripts/"))


def test_the_version_has_a_section_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count("\n## [Unreleased]\n") == 1
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
