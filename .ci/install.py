"""Installs packages of the lock, with all that they need, into the environment of the Python that runs this.

    .venv/bin/python .ci/install.py 'ringmaster-ml[dev]'

Every file has to have a hash of requirements.txt. `ringmaster-ml` means the project's dependencies,
`ringmaster-ml[EXTRA]` for those of an extra too. The Makefile, the workflows and the Dockerfile install by this alone.
It needs nothing but pip.

- torch comes first, as the build that the index of `--torch-index` offers, PyPI's by default. PyPI's is for CUDA, whose
  libraries it needs; others may not. So that its index offers no other package, it is downloaded by itself.
- setuptools and uv come next: a few packages are published as sources only, and are built by the locked setuptools.
- uv, where it is among the packages, installs the others in a third of pip's time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where PYTHONSAFEPATH is set, too
from lock_file import LOCK, LockedPackage, package_names, read_lock, read_project, with_dependencies

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
INSTALL = ("install", "--quiet", "--no-deps", "--require-hashes")


def install(packages: list[LockedPackage], *options: str, by: tuple[str, ...] = PIP) -> None:
    """Installs exactly these packages, and refuses a file whose hash the lock does not have."""
    if not packages:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(package.text for package in packages))
        file.flush()
        subprocess.run([*by, *INSTALL, *options, "--requirement", file.name], check=True)


def install_torch(torch: LockedPackage, *, index: str | None) -> None:
    """Installs the build of torch that an index offers, unless this version is installed."""
    if is_installed(torch):
        return
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", *(["--index-url", index] if index else []), "--dest", folder]
        subprocess.run([*PIP, "download", *options, f"torch=={torch.version}"], check=True)
        install([torch], "--no-index", "-f", folder)


def is_installed(package: LockedPackage) -> bool:
    """Tells whether a version is installed, as whichever build."""
    try:
        return metadata.version(package.name).partition("+")[0] == package.version
    except metadata.PackageNotFoundError:
        return False


def needs_cuda() -> bool:
    """Tells whether the build of torch that is installed needs CUDA's libraries."""
    return any(re.match(r"nvidia-|cuda-", requirement) for requirement in metadata.requires("torch") or [])


def main() -> None:
    """Installs what the command line names."""
    parser = argparse.ArgumentParser(description="Install packages of requirements.txt with all that they need.")
    parser.add_argument("requirements", nargs="+", metavar="PACKAGE", help="such as 'ringmaster-ml[dev]'")
    parser.add_argument("--torch-index", metavar="URL", help="index of the build of torch, in place of PyPI")
    parser.add_argument("--no-deps", action="store_true", help="install nothing that the packages need")
    options = parser.parse_args()
    packages = read_lock(LOCK.read_text())
    names = package_names(options.requirements, project=read_project())
    if unknown := names - {package.name for package in packages}:
        parser.error(f"requirements.txt has no {', '.join(sorted(unknown))}. To fix: make lock")
    if not options.no_deps:
        names = with_dependencies(names, packages=packages)
    chosen = [package for package in packages if package.name in names]
    for torch in [package for package in chosen if package.name == "torch"]:
        install_torch(torch, index=options.torch_index)
        chosen = [package for package in chosen if package.name != "torch" and (not package.for_cuda or needs_cuda())]
    tools = [package for package in chosen if package.name in ("setuptools", "uv")]
    install(tools)
    others = [package for package in chosen if package not in tools]
    uv = (str(Path(sys.executable).with_name("uv")), "pip")
    if "uv" in names:
        install(others, "--no-build-isolation", "--python", sys.executable, by=uv)
    else:
        install(others, "--no-build-isolation")


if __name__ == "__main__":
    main()
