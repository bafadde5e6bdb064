"""Requirements files are read with everything that they include. Lines that only this machine can install are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.documents.requirements_file import parse_requirements, read_requirements

ACCEPTED = """\
# for training
torch==2.4.0  # the newest
numpy>=1.2 \\
    --hash=sha256:abc \\
    --hash=sha256:def
-r more/base.txt
--constraint=limits.txt
--index-url https://user:${TOKEN}@host/simple
--find-links /shared/wheels
-e git+https://github.com/x/y
tools @ git+ssh://git@github.com/x/tools
--extra-index-url https://host/simple?private_token=${TOKEN}&name=x
foo[bar, baz] ; python_version < "3.9"
/shared/own-1.0-py3-none-any.whl
requests
"""


def test_lines_are_normalized_and_included_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text("einops\n-c../limits.txt\n")
    (tmp_path / "limits.txt").write_text("scipy<2\n")
    path = tmp_path / "requirements.txt"
    path.write_text(ACCEPTED)
    found = read_requirements(str(path), "requirements.txt")
    assert found.lines[:3] == ("torch==2.4.0", "numpy>=1.2 --hash=sha256:abc --hash=sha256:def", "einops")
    assert (len(found.lines), found.constraints) == (11, ("scipy<2", "scipy<2"))
    # Comments and blanks do not change the digest; packages and settings of pip do.
    path.write_text("\n# a comment\n" + ACCEPTED.replace("  # the newest", ""))
    assert read_requirements(str(path)).digest({"OTHER": "x"}) == found.digest({})
    assert found.digest({"PIP_INDEX_URL": "x"}) != found.digest({})
    path.write_text(ACCEPTED.replace("2.4.0", "2.4.1"))
    assert read_requirements(str(path)).digest({}) != found.digest({})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("torch 2.4.0", "`torch 2.4.0` is not a valid requirement"),
        ("numpy, pandas", "`numpy, pandas` is not a valid requirement"),
        ("-e .", "`.` is not an absolute path or a URL, so the nodes cannot find it"),
        ("./own", "`./own` is not an absolute path or a URL"),
        ("own-1.0-py3-none-any.whl", "`own-1.0-py3-none-any.whl` is not an absolute path or a URL"),
        ("own @ file:wheels/own.whl", "`file:wheels/own.whl` is not an absolute path or a URL"),
        ("--find-links wheels", "`wheels` is not an absolute path or a URL"),
        ("-r requirements.txt", "including `requirements.txt` here makes a cycle"),
        ("-r https://host/base.txt", "a URL cannot be included"),
        ("-c missing.txt", "the file does not exist"),
        ("--index-url https://user:secret@host/simple", "the URL contains a password"),
        ("own @ https://token@host/own.whl", "the URL contains a password"),
        ("--index-url https://host/simple?private_token=secret", "the URL contains a password"),
        ("own @ https://host/own.whl?x=1&X-Amz-Signature=secret", "the URL contains a password"),
        ("own @ git+ssh://git:secret@host/own", "the URL contains a password"),
        ("-e hg+https://user:${A}secret@b@host/own", "the URL contains a password"),
        ("# nothing", "the file contains no packages"),
    ],
)
def test_lines_that_nodes_cannot_install_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(ProblemsFound) as refused:
        read_requirements(str(path), "requirements.txt")
    (problem,) = refused.value.problems
    assert message in problem.message
    assert problem.where.file in ("requirements.txt", "missing.txt")
    assert "secret" not in str(refused.value)


def test_at_most_fifty_files_may_be_included(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    includes = []
    for number in range(51):
        (tmp_path / f"{number}.txt").write_text(f"package{number}\n")
        includes.append(f"-r {number}.txt\n")
    path.write_text("".join(includes[:50]))
    assert len(read_requirements(str(path)).lines) == 50
    path.write_text("".join(includes))
    with pytest.raises(ProblemsFound) as refused:
        read_requirements(str(path))
    (problem,) = refused.value.problems
    assert (problem.where.line, problem.message) == (51, "more than 50 files are included")


def test_the_size_of_all_requirements_is_limited_in_bytes() -> None:
    parse_requirements(['package ; extra == "' + "é" * 500_000 + '"'], "requirements.txt")
    with pytest.raises(ProblemsFound, match="the requirements are larger than 1 MiB"):
        parse_requirements(['package ; extra == "' + "é" * 530_000 + '"'], "requirements.txt")
