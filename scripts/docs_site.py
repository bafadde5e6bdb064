"""Hooks of mkdocs, which builds the website of docs/ (``make docs``).

The navigation is the table of docs/README.md. Files outside docs/ that pages link to become part of the site: README.md,
CHANGELOG.md, CONTRIBUTING.md and tests/README.md as pages, others as plain files below ``source/``. The API pages come from
docstrings.
See https://www.mkdocs.org/dev-guide/plugins/#events for the hooks.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "introduction.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
}
"""Pages of the repository outside docs/, and their names on the site."""
API = {
    "distflow": "The Python API: submit workflows, watch them and get their results. `python.md` introduces it.",
    "distflow.train": "The library for training scripts. Import each name from `distflow.train`.",
    "distflow.client": "The calls behind the commands of the command line. Import each name from `distflow.client`.",
}
"""Packages that have an API page, and the first paragraph of that page."""
_LINK = re.compile(r"(\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation from the table of docs/README.md."""
    nav: list[Any] = [{"Home": "README.md"}, {"Introduction": "introduction.md"}]
    section: list[Any] = []
    for line in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 2 or not line.startswith("|"):
            continue
        if title := re.fullmatch(r"\*\*(.+)\*\*", cells[0]):
            section = []
            nav.append({title[1].capitalize(): section})
        section += [path for path in re.findall(r"\]\(([a-z0-9/-]+\.md)\)", cells[1]) if path not in section]
    nav.append({"Reference": [*({package: f"{package}.md"} for package in API), "changelog.md", "contributing.md", "tests.md"]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in docs/."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=texts[path]))
    for package, text in API.items():
        files.append(File.generated(config, f"{package}.md", content=_api_page(package, text)))
    linked = {ROOT / path: text for path, text in texts.items()}
    linked |= {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
    added: set[str] = set()
    for page, text in linked.items():
        for link in _LINK.finditer(text):
            target = _in_repository(page, link[2]) or "docs/"
            if not target.startswith("docs/") and target not in {*PAGES, *added} and (ROOT / target).is_file():
                added.add(target)
                files.append(File.generated(config, f"source/{target}.txt", content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links that lead out of docs/ by links to the site's own files; links to directories become plain text."""
    del config, files
    name = page.file.src_uri
    folder = posixpath.dirname(name) or "."
    source = next((ROOT / path for path, own in PAGES.items() if own == name), ROOT / "docs" / name)

    def replaced(link: re.Match[str]) -> str:
        path = _in_repository(source, link[2])
        if path is None:
            return link[0]
        if not path.startswith("docs/") and path not in PAGES and not (ROOT / path).is_file():
            return link[1][1:-1]
        target = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.txt")
        return f"{link[1]}({posixpath.relpath(target, folder)}{link[3] or ''})"

    return _LINK.sub(replaced, markdown)


def _api_page(package: str, text: str) -> str:
    """Return the API page of a package. Its names are those that its ``__init__.py`` imports for type checkers."""
    tree = ast.parse((ROOT / "src" / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}.")
    ]
    names = sorted((alias.name, str(node.module)) for node in imports for alias in node.names)
    blocks = [f"::: {module}.{name}\n    options: {{heading_level: 2, show_root_full_path: false}}\n" for name, module in names]
    return "\n".join([f"# `{package}`\n", f"{text}\n", *blocks])


def _in_repository(page: Path, target: str) -> str | None:
    """Return the path of a relative link in the repository, or ``None`` for a URL."""
    if re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(page.parent.relative_to(ROOT).as_posix(), target))
