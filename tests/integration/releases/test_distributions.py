"""The files of a release: built again they are equal, their bill of materials is the lock, they run by themselves.

`make release-check` runs this for the files in dist/; elsewhere they are built here.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKED = re.compile(r"^([a-z0-9.-]+)==([^\s\\]+)", re.MULTILINE)

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def run(*command, folder, **settings):
    """Runs a command as in a shell of its own: without what make, pytest and this checkout set."""
    foreign = ("MAKE", "MFLAGS", "PYTHON", "PREFECT_", "MLFLOW_", "RINGMASTER_", "VIRTUAL_ENV")
    variables = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=variables | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What is committed, and a file that is not."""
    folder = tmp_path_factory.mktemp("clone") / "checkout"
    run("git", "clone", "--quiet", "--no-local", ROOT, folder, folder=ROOT)
    (folder / "src" / "ringmaster" / "left_over.py").touch()
    return folder


@pytest.fixture(scope="module")
def dist(clone):
    """The folder of the files of the release."""
    if folder := os.environ.get("DIST"):
        return Path(folder)
    run("make", "dist", folder=clone)
    return clone / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sources(dist, tmp_path_factory):
    """The unpacked source distribution."""
    (file,) = dist.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / file.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def bill(wheel):
    """The text of the bill of materials."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/sboms/[^/]+", name)]
        return archive.read(name).decode()


def committed_at(clone):
    return run("git", "log", "-1", "--format=%ct", folder=clone).strip()


def build(folder, *targets, to, at):
    """Builds as another person would: elsewhere, in another time zone, and with other rights of new files."""
    words = [word for target in targets for word in ("--target", target)]
    command = f"umask 077 && find . -exec touch {{}} + && exec {sys.executable} -m hatchling build --directory {to}"
    run("sh", "-c", f"{command} {shlex.join(words)}", folder=folder, SOURCE_DATE_EPOCH=at, TZ="Asia/Tokyo", LC_ALL="C")
    return {file.name: file.read_bytes() for file in to.iterdir()}


def test_another_build_of_the_commit_is_equal_byte_by_byte(clone, dist, tmp_path):
    run("sh", "-c", f"mkdir {tmp_path}/other && git archive HEAD | tar -x -C {tmp_path}/other", folder=clone)
    other = build(tmp_path / "other", "wheel", "sdist", to=tmp_path / "dist", at=committed_at(clone))
    assert {file.name for file in dist.iterdir()} == set(other)
    assert [file.name for file in dist.iterdir() if file.read_bytes() != other[file.name]] == []


def test_the_sources_build_the_wheel(clone, wheel, sources, tmp_path):
    shutil.copytree(sources, tmp_path / "sources", symlinks=True)
    built = build(tmp_path / "sources", "wheel", to=tmp_path / "dist", at=committed_at(clone))
    assert built == {wheel.name: wheel.read_bytes()}


def test_the_bill_of_materials_is_valid(bill):
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill)
    assert fault is None, str(fault)[:2000]
    unknown = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.replace('"components"', '"parts"'))
    assert unknown is not None


def test_the_bill_of_materials_is_the_lock(bill, sources):
    document = json.loads(bill)
    parts = document["components"]
    lock = set(LOCKED.findall((ROOT / "requirements.txt").read_text()))
    assert {(part["name"], part["version"]) for part in parts} == lock
    assert (sources / "requirements.txt").read_bytes() == (ROOT / "requirements.txt").read_bytes()
    assert all(part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}" for part in parts)
    references = {part["bom-ref"] for part in parts}
    graph = {node["ref"]: set(node["dependsOn"]) for node in document["dependencies"]}
    assert set(graph) == references | {document["metadata"]["component"]["bom-ref"]}
    assert set().union(*graph.values()) == references, "each package is needed by something"


def test_the_bill_of_materials_tells_what_the_wheel_needs_from_what_extras_need(bill, wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    scopes = {part["name"]: part["scope"] for part in json.loads(bill)["components"]}
    needed = {canonicalize_name(line.name) for line in requirements if line.marker is None}
    assert needed <= {name for name, scope in scopes.items() if scope == "required"}
    assert (scopes["torch"], scopes["nvidia-cublas"]) == ("required", "required")
    assert (scopes["ray"], scopes["faiss-cpu"]) == ("optional", "optional")
    assert (scopes["pytest"], scopes["hatchling"]) == ("excluded", "excluded")


def quickstart():
    """The commands of the README that begin after the environment is there."""
    (block,) = re.findall(r"^## Quickstart\n.*?^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    commands = [line for line in lines if line[0].startswith(".venv/bin/")]
    assert [Path(line[0]).name for line in commands] == ["python", "ringmaster"]
    return commands


def test_the_quickstart_runs_with_the_wheel_in_an_empty_environment(wheel, sources, tmp_path):
    """The packages of the lock are installed from the unpacked sources, as docs/releases.md says, then the wheel."""
    run(sys.executable, "-m", "venv", tmp_path / ".venv", folder=tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    torch_index = os.environ.get("TORCH_INDEX")
    options = ["--torch-index", torch_index] if torch_index else []
    run(python, sources / ".ci" / "install.py", *options, "ringmaster-ml", folder=tmp_path)
    run(python, "-m", "pip", "install", "--no-deps", wheel, folder=tmp_path)
    run(python, "-m", "pip", "check", folder=tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    where = "import importlib.metadata as m, ringmaster; print(m.version('ringmaster-ml'), ringmaster.__file__)"
    answer = run(python, "-c", where, folder=tmp_path).split()
    assert answer[0] == version
    installed = Path(answer[1]).parent
    assert installed.is_relative_to(tmp_path)
    shutil.copytree(installed / "examples", tmp_path / "examples")
    make_base, sweep = quickstart()
    run(*make_base, folder=tmp_path)
    answer = json.loads(run(*sweep, "--json", folder=tmp_path))
    assert answer["status"] == "done"
