"""The packages of extras: `ringmaster run` imports none of them, and a feature without its own is refused."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ringmaster import extras
from ringmaster.distribution import DISTRIBUTION
from ringmaster.errors import DatabaseFileError, InputError
from ringmaster.features.ray.ray_engine import RayOptions
from ringmaster.flows.output import LOG_FORMAT, log_format
from ringmaster.flows.services.service_definitions import PoolOptions, databases, faults
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.sweeping.space import Range, findings
from ringmaster.techniques.data.images import read_image

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Prefect requires some of the packages, too, and has imported what it uses of them before they are hidden.
RUN = """
import sys
import prefect.main
from ringmaster.extras import PACKAGES
for package in [package for packages in PACKAGES.values() for package in packages]:
    sys.modules[package] = None
import ringmaster.flows.cli, ringmaster.flows.commands.running, ringmaster.flows.train_batch
import ringmaster.flows.batch.local_run, ringmaster.flows.batch.flow_runs
import ringmaster.tasks.sweeping.spec, ringmaster.techniques.data.sources.image_classification
"""


def names_of(extra: str) -> set[str]:
    """The distributions of an extra; those of another extra that it includes are not among them."""
    return {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in EXTRAS[extra]} - {DISTRIBUTION}


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def install(extra: str) -> str:
    return re.escape(f"not installed. To fix: pip install 'ringmaster-ml[{extra}]'")


def test_what_a_message_says_to_install_is_this_project():
    assert PROJECT["name"] == DISTRIBUTION
    requirement = Requirement(shlex.split(extras.install_command("pool"))[-1])
    assert (requirement.name, requirement.extras) == (PROJECT["name"], {"pool"})


def test_each_package_belongs_to_a_distribution_of_its_extra():
    distributions = packages_distributions()
    assert set(extras.PACKAGES) == set(EXTRAS) - {"dev"}
    for extra, packages in extras.PACKAGES.items():
        found = {
            re.sub(r"[-_.]+", "-", name).lower() for package in packages for name in distributions.get(package, ())
        }
        # Flask-WTF comes with mlflow[auth], psycopg's driver with psycopg[binary].
        assert found <= names_of(extra) | {"flask-wtf"}, extra


def test_a_run_imports_no_package_of_an_extra():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", extras.PACKAGES["pool"])
def test_a_pool_without_its_packages_is_refused(package, monkeypatch, tmp_path):
    hide(monkeypatch, package)
    found = faults(PoolOptions(home=tmp_path, databases=databases(None, home=tmp_path), password="long enough"))
    assert [fault for fault in found if re.search(f"^`ringmaster up` needs {package}, {install('pool')}$", fault)]


def test_a_database_server_without_its_driver_is_refused(monkeypatch):
    hide(monkeypatch, "psycopg")
    with pytest.raises(DatabaseFileError, match=f"PostgreSQL needs psycopg, {install('pool')}"):
        Database("postgresql://me@127.0.0.1:1/pool")


def test_logs_as_json_without_their_package_are_refused(monkeypatch):
    hide(monkeypatch, "pythonjsonlogger")
    monkeypatch.setenv(LOG_FORMAT, "json")
    with pytest.raises(InputError, match=f"{LOG_FORMAT}=json needs pythonjsonlogger, {install('pool')}"):
        log_format()
    monkeypatch.setenv(LOG_FORMAT, "text")
    log_format()


def test_the_engine_ray_without_ray_is_refused(monkeypatch):
    hide(monkeypatch, "ray")
    assert any(re.search(f"needs ray, {install('ray')}", fault) for fault in RayOptions().faults(has_server=True))


def test_images_without_pillow_are_refused(monkeypatch):
    hide(monkeypatch, "PIL")
    with pytest.raises(ValueError, match=f"images needs PIL, {install('images')}"):
        read_image(b"")


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_samplers_without_optuna_are_refused_except_for_grids(sampler, monkeypatch):
    hide(monkeypatch, "optuna")
    space = (Range(key="optimizer.lr", low=0.1, high=0.2, step=0.1),)
    found = findings(space, sampler=sampler, num_trials=2)
    expected = (
        [] if sampler == "grid" else [(f"{sampler} needs optuna, not installed", "pip install 'ringmaster-ml[sweep]'")]
    )
    assert [(each.message, each.remedy) for each in found] == expected
