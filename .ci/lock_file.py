"""Reads requirements.txt: the lock, which has the versions and the hashes of the whole environment."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.txt"
CUDA_HEADING = "# CUDA: what the build of torch for CUDA needs, and the one for CPUs does not.\n"
ENTRY = re.compile(r"^(?P<name>[a-z0-9.-]+)==(?P<version>[^\s\\]+).*\n(?P<rest>(?:[ #].*\n)*)", re.MULTILINE)
# `# via torch`, or a line of its own for each package that needs it.
PARENT = re.compile(r"#\s+(?:via\s+)?([a-z0-9][a-z0-9.-]*)(?: \(pyproject\.toml\))?$", re.MULTILINE)
HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<extras>[^\]]*)\])?")


@dataclass(frozen=True)
class LockedPackage:
    """A version of a package.

    Args:
        name: its normalized name
        version: its version
        text: its lines of the lock, as pip and uv read them
        hashes: of its files, each as `sha256:...`
        parents: names of the packages that need it
        for_cuda: whether only the build of torch for CUDA needs it
    """

    name: str
    version: str
    text: str
    hashes: frozenset[str]
    parents: frozenset[str]
    for_cuda: bool


def read_lock(text: str) -> list[LockedPackage]:
    """Returns the packages of a lock in their order. A name has several versions where those of Python differ in it."""
    cuda_begins = text.find(CUDA_HEADING)
    return [
        LockedPackage(
            name=entry["name"],
            version=entry["version"],
            text=entry[0],
            hashes=frozenset(HASH.findall(entry["rest"])),
            parents=frozenset(PARENT.findall(entry["rest"])),
            for_cuda=0 <= cuda_begins < entry.start(),
        )
        for entry in ENTRY.finditer(text)
    ]


def read_project(root: Path = ROOT) -> dict[str, Any]:
    """Returns the table `project` of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return project


def package_names(requirements: Iterable[str], *, project: dict[str, Any]) -> set[str]:
    """Returns the names of required packages. The project's own name means its dependencies and extras."""
    names: set[str] = set()
    for requirement in requirements:
        match = REQUIREMENT.match(requirement)
        assert match, requirement
        if match["name"] != project["name"]:
            names.add(re.sub(r"[._-]+", "-", match["name"]).lower())
            continue
        lines = list(project["dependencies"])
        for extra in filter(None, (match["extras"] or "").split(",")):
            lines += project["optional-dependencies"][extra.strip()]
        names |= package_names(lines, project=project)
    return names


def with_dependencies(names: Iterable[str], *, packages: list[LockedPackage]) -> set[str]:
    """Returns names and the names of all that these packages need."""
    needed: set[str] = set()
    waiting = set(names)
    while waiting:
        needed |= waiting
        waiting = {package.name for package in packages if package.parents & waiting} - needed
    return needed
