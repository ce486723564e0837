"""The lock: it satisfies pyproject.toml, covers all dependencies with hashes, and is what installs by it read."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pip
import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def script(name):
    """A module of `.ci`, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lock_file = script("lock_file")
PROJECT = lock_file.read_project()
LOCK = lock_file.LOCK.read_text()
PACKAGES = lock_file.read_lock(LOCK)
BY_NAME = {name: [package for package in PACKAGES if package.name == name] for name in {p.name for p in PACKAGES}}


def requirements():
    lines = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT["name"]]


def marker_of(package):
    return Marker(re.search(r" ; (.*) \\$", package.text.splitlines()[0])[1])


def chosen(name, *, python):
    """The version of a package for a version of Python."""
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0], "sys_platform": "linux"}
    (package,) = [package for package in BY_NAME[name] if marker_of(package).evaluate(environment)]
    return package


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_its_version_of_a_dependency_is_one_that_is_allowed(requirement):
    for python in ("3.11.0", "3.13.5", "3.14.0"):
        assert requirement.specifier.contains(chosen(canonicalize_name(requirement.name), python=python).version)


def test_every_line_belongs_to_a_package_that_has_hashes():
    """What the pattern of an entry does not match would be installed by nothing."""
    left = LOCK
    for package in PACKAGES:
        assert package.hashes, package.name
        left = left.replace(package.text, "", 1)
    assert [line for line in left.splitlines() if line and not line.startswith("#")] == []
    assert LOCK.count("--hash=") == sum(len(package.hashes) for package in PACKAGES)


def test_all_that_is_in_it_is_needed():
    names = lock_file.package_names([f"{PROJECT['name']}[dev]"], project=PROJECT)
    assert lock_file.with_dependencies(names, packages=PACKAGES) == set(BY_NAME)


def test_it_says_what_the_project_itself_needs():
    """The bill of materials has it from there."""
    extras = ",".join(PROJECT["optional-dependencies"])
    needed = lock_file.package_names([f"{PROJECT['name']}[{extras}]"], project=PROJECT)
    assert {package.name for package in PACKAGES if PROJECT["name"] in package.parents} == needed


def test_it_has_all_that_the_installed_packages_need():
    """A dependency that the lock lacks would not be installed: nothing resolves after it."""
    missing = set()
    for package in PACKAGES:
        needed = [requirement for requirement in requirements_of(package) if is_needed(requirement)]
        missing |= {canonicalize_name(requirement.name) for requirement in needed} - set(BY_NAME)
    assert missing == set()


def requirements_of(package):
    """What a package needs by its own account, where this version is installed: other environments have others."""
    try:
        installed = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return []
    is_locked = installed.version.partition("+")[0] == package.version
    return [Requirement(line) for line in (installed.requires or []) if is_locked]


def is_needed(requirement):
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def test_torch_has_builds_for_cpus_and_for_cuda():
    """PyPI has a wheel for CUDA of each Python and processor; the index for CPUs has as many."""
    (torch,) = BY_NAME["torch"]
    of_cuda = [package for package in PACKAGES if package.for_cuda]
    assert {"nvidia-cublas", "triton"} <= {package.name for package in of_cuda}
    assert all(re.match(r"nvidia-|cuda-|triton$", package.name) for package in of_cuda)
    assert len(torch.hashes) >= 2 * 2 * len(("3.11", "3.12", "3.13", "3.14"))


def test_a_part_of_it_has_what_an_extra_needs_and_no_more():
    names = lock_file.package_names([f"{PROJECT['name']}[kubernetes]"], project=PROJECT)
    part = lock_file.with_dependencies(names, packages=PACKAGES)
    assert {"torch", "prefect", "prefect-kubernetes", "psycopg-binary", "kubernetes-asyncio"} <= part
    assert not {"pytest", "mypy", "ray", "hatchling", "mkdocs-material"} & part


@pytest.fixture
def checkout(tmp_path):
    """The scripts and a lock of one package."""
    (tmp_path / ".ci").mkdir()
    for name in ("install.py", "lock_file.py"):
        (tmp_path / ".ci" / name).write_text((ROOT / ".ci" / name).read_text())
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "ringmaster-ml"\ndependencies = ["tiny"]\n')
    return tmp_path


def tiny_wheel(folder):
    """Writes a wheel of a package without files, and returns its hash."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(folder, *, sha256):
    """Installs by a lock that has this hash into an environment in a folder, which is the only index."""
    (folder / "requirements.txt").write_text(f"tiny==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:{sha256}\n")
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}
    command = [str(folder / "venv" / "bin" / "python"), ".ci/install.py", "ringmaster-ml"]
    done = subprocess.run(command, cwd=folder, env=variables | offline, capture_output=True, text=True, check=False)
    installed = [path.name for path in (folder / "venv").glob("lib/python*/site-packages/tiny.py")]
    return done, installed


def test_a_file_is_installed_if_the_lock_has_its_hash(checkout):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / "venv")], check=True)
    (packages,) = (checkout / "venv").glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)  # to install it would take seconds
    sha256 = tiny_wheel(checkout)
    done, installed = install(checkout, sha256="0" * 64)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert installed == []
    done, installed = install(checkout, sha256=sha256)
    assert done.returncode == 0, done.stderr
    assert installed == ["tiny.py"]


def test_a_package_that_the_lock_lacks_is_named(checkout):
    (checkout / "requirements.txt").write_text("")
    command = [sys.executable, ".ci/install.py", "ringmaster-ml"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "requirements.txt has no tiny. To fix: make lock" in done.stderr
