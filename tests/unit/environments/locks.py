"""Locks whose packages are wheels in their folder, so that uv makes environments without a network."""

import site
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ringmaster.features.environment.installation import uv_program
from ringmaster.tasks.batch import Batch, parse_batch

LIBRARIES = {"libraries_of_tests.pth": "".join(f"{folder}\n" for folder in site.getsitepackages())}
"""The file of a package with which an environment has the libraries of these tests."""
JOB = "{architecture: LlamaForCausalLM}, data: {source: python-stdlib, seq_len: 8}, num_steps: 1"

_locks: dict[str, str] = {}


def write_wheel(folder: Path, name: str, files: Mapping[str, str], *, version: str = "1.0") -> str:
    """Writes a wheel of a package with these files; returns its name."""
    wheel, about = f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{about}/RECORD"
    content[record] = "".join(f"{each},,\n" for each in [*content, record])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for each, text in content.items():
            archive.writestr(zipfile.ZipInfo(each), text)
    return wheel


def write_lock(folder: Path, packages: Mapping[str, Mapping[str, str]], *, version: str = "1.0") -> Path:
    """Locks a project whose dependencies are these packages, each with its files."""
    wheels = {name: write_wheel(folder, name, files, version=version) for name, files in packages.items()}
    sources = "".join(f'{name} = {{path = "{wheel}"}}\n' for name, wheel in wheels.items())
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "jobs"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = {[*wheels]}\n'
        f"[tool.uv.sources]\n{sources}"
    )
    lock, key = folder / "uv.lock", repr((packages, version))  # wheels of the same files are the same
    if key not in _locks:
        uv = uv_program()
        assert uv is not None
        subprocess.run([uv, "lock", "--quiet", "--offline"], cwd=folder, check=True)
        _locks[key] = lock.read_text()
    lock.write_text(_locks[key])
    return lock


def batch_of(folder: Path, environment: str, *, model: str = JOB) -> Batch:
    """Returns the batch of a job with an environment, as its file is read."""
    return parse_batch(f"jobs: [{{name: a, environment: {environment}, model: {model}}}]", folder=folder, name="b.yaml")
