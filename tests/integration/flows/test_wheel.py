"""The contents of an installed wheel: one import root, alongside a project's own packages of any name."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from ringmaster.extras import PACKAGES

ROOT = Path(__file__).parents[3]
# Packages of extras that Prefect or MLflow needs, too, or loads where they are installed.
NEEDED_PACKAGES = ("cryptography", "google.protobuf", "prefect_kubernetes", "prometheus_client", "pythonjsonlogger")

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(folder)], check=True, capture_output=True, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An interpreter with the wheel installed, and with the libraries of this one except for those of extras."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, env=environment())
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    (Path(own) / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    hidden = [package for packages in PACKAGES.values() for package in packages if package not in NEEDED_PACKAGES]
    (Path(own) / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    return python


@pytest.fixture
def project(tmp_path):
    """A user's project whose packages have the names of Ringmaster's, and must not be imported."""
    (tmp_path / "flows").mkdir()
    for name in ("flows/__init__.py", "tasks.py", "techniques.py", "model_lineage.py"):
        (tmp_path / name).write_text("raise RuntimeError('this is the user\\'s own')\n")
    return tmp_path


def environment(**settings):
    """The environment without variables that name this checkout or a pool."""
    foreign = ("PYTHONPATH", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE")
    return {**{name: text for name, text in os.environ.items() if name not in foreign}, **settings}


def run(project, *words):
    command, home = [str(word) for word in words], str(project / ".ringmaster")
    done = subprocess.run(
        command, cwd=project, env=environment(RINGMASTER_HOME=home), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_one_name_at_the_top_and_all_that_deployments_need(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"ringmaster"}
    assert {"ringmaster/py.typed", "ringmaster/prefect.yaml", "ringmaster/examples/tiny_batch.yaml"} <= {*names}
    of_repository = {
        f"ringmaster/{file.relative_to(ROOT)}"
        for package in ("flows", "tasks", "techniques", "model_lineage")
        for file in (ROOT / package).rglob("*.py")
    }
    assert of_repository <= {*names}


def test_a_batch_is_trained_beside_packages_of_the_same_names(python, project):
    command = python.with_name("ringmaster")
    answer = json.loads(run(project, command, "run", "examples/tiny_batch.yaml", "--json"))
    assert answer["status"] == "done"
    assert all(Path(job["model_dir"]).is_relative_to(project) for job in answer["jobs"])


def test_a_feature_whose_extra_is_not_installed_is_refused(python, project):
    command = [python.with_name("ringmaster"), "up"]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        "`ringmaster up` needs flask_wtf, psycopg, not installed. To fix: pip install 'ringmaster-ml[pool]'"
        in " ".join(done.stderr.split())
    )


def test_the_python_of_the_readme_runs_beside_them(python, project):
    source = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert source
    (project / "train.py").write_text(source[1])
    last = run(project, python, "train.py").splitlines()[-1]
    assert last.startswith("done {'makespan_s': ")
    assert last.count("'loss': ") == 2, "both models were evaluated"
