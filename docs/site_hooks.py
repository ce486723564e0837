"""Hooks of mkdocs: pages of the site for files of the repository outside of docs/.

Documents link to neighboring files, as readers of the repository need. On the site, CONTRIBUTING.md and its like are
pages of `project/`, and each other file or folder that a page links to is a page of `source/` which shows it.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import agent_files
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DOCUMENTS = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
README = "README.md"  # of the repository: on the site, index.md replaces it
LANGUAGES = {".json": "json", ".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#\s])")

log = logging.getLogger("mkdocs.plugins.site_hooks")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Writes the files for agents. Replaces each entry of the navigation that has a * by the pages that it matches."""
    agent_files.write()
    pages = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    config.nav = _expanded(config.nav, pages)
    return config


def _expanded(entry: Any, pages: list[str]) -> Any:
    if isinstance(entry, dict):
        expanded = {title: _expanded(value, pages) for title, value in entry.items()}
        return {title: value for title, value in expanded.items() if value}
    if not isinstance(entry, list):
        return entry
    entries = []
    for each in entry:
        is_pattern = isinstance(each, str) and "*" in each
        entries += [page for page in pages if fnmatchcase(page, each)] if is_pattern else [_expanded(each, pages)]
    return [each for each in entries if each]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents at the root of the repository, and every other file that a page links to."""
    for name in DOCUMENTS:
        files.append(File.generated(config, _site_path(ROOT / name), content=(ROOT / name).read_text()))
    waiting = [path for file in files.documentation_pages() for path in _linked(file.content_string, _folder(file))]
    known = {file.src_uri for file in files}
    while waiting:
        path = waiting.pop()
        site_path = _site_path(path)
        if site_path not in known and path.exists():
            known.add(site_path)
            files.append(File.generated(config, site_path, content=_shown(path)))
            waiting += _visible(path) if path.is_dir() else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at the pages that show their targets."""
    folder = _folder(page.file)
    if page.file.src_uri.startswith("source/"):
        return markdown

    def pointed(match: re.Match[str]) -> str:
        path = _target(match[1], folder)
        if not path.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, match[1])
        return posixpath.relpath(_site_path(path), posixpath.dirname(page.file.src_uri))

    return _with_lists(LINK.sub(pointed, markdown))


def _with_lists(markdown: str) -> str:
    """Writes lists for Python-Markdown, which needs a blank line before one, and more indentation than GitHub."""
    lines: list[str] = []
    is_fenced = is_list = False
    for line in markdown.split("\n"):
        is_item = not is_fenced and line.startswith("- ")
        if is_item and not is_list:
            lines.append("")
        if is_item or (line and not line.startswith(" ")):
            is_list = is_item
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        lines.append(f"  {line}" if is_list and line.startswith("  ") else line)
    return "\n".join(lines)


def _folder(file: File) -> Path:
    """Returns the folder from which the links of a page lead."""
    return ROOT if file.src_uri.startswith("project/") else (DOCS / file.src_uri).parent


def _target(link: str, folder: Path) -> Path:
    return Path(posixpath.normpath(folder / link))


def _linked(markdown: str, folder: Path) -> list[Path]:
    """Returns the targets of a page's links that are neither pages nor pictures of docs/."""
    paths = [_target(link, folder) for link in LINK.findall(markdown)]
    return [path for path in paths if _site_path(path).startswith("source/")]


def _site_path(path: Path) -> str:
    """Returns where a file or folder of the repository is on the site."""
    if path.is_relative_to(DOCS) and (path.suffix in (".md", ".svg", ".png") or not path.exists()):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name == README:
        return "index.md"
    return f"project/{name.lower()}" if name in DOCUMENTS else f"source/{name}.md"


def _visible(folder: Path) -> list[Path]:
    # Not what examples and tests have made there: data, caches.
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", ".")
    names = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split("\0")
    visible = {folder / name.partition("/")[0] for name in names if name and not name.startswith(".")}
    return sorted(path for path in visible if path.exists())


def _shown(path: Path) -> str:
    """Returns the page of a file or folder."""
    title = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(f"- [{each.name}]({path.name}/{each.name}.md)\n" for each in _visible(path))
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def on_post_build(config: MkDocsConfig) -> None:
    """Copies what llms.txt links to, the sources of the pages, next to the pages; and the skill."""
    for path in DOCS.rglob("*.md"):
        copy = Path(config.site_dir, path.relative_to(DOCS))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
