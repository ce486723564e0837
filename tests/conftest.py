"""Settings and options for all tests."""

import gc
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

pytest_plugins = ["tests.durations"]

# Numerics as in a gang, set before torch is imported. A single thread's sums do not depend on memory addresses.
# Several threads would wait for each other in loops on a busy machine: a test would take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO")
# Worker processes import the modules that the tests' jobs name, such as `tests.integration.stubs`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
# A test that gives Prefect no server must fail, instead of making Prefect start its own, without a password.
os.environ["RINGMASTER_STAY_S"] = "0"  # tests whose commands have a terminal leave nothing
os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "false"
# Tests write thousands of small files and wait until the disk has each of them: in memory, where there is enough of it,
# they do not wait. `--basetemp FOLDER` names another place.
MEMORY, MIN_FREE_BYTES = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MIN_FREE_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

with suppress(ImportError):  # a machine with a GPU may have only torch and pytest, which suffices for its tests
    from ringmaster.compat.jsonschema import import_without_iris

    import_without_iris()  # before a test file imports Prefect, which would take a second longer

with suppress(ImportError):
    from typer import testing

    # A CliRunner makes all commands anew for each call, which takes 30 ms.
    testing._get_command = cache(testing._get_command)

gc.disable()  # until all modules are imported: none of their objects is garbage

with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # By default Hypothesis fails a test whose example takes 0.2 s, or whose examples are drawn slowly. Any example may
    # be that slow on a busy machine.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # `--hypothesis-profile searching` draws other examples in each run. Otherwise every run draws the same, so that a
    # failure is caused by a change.
    settings.register_profile("searching", patient)
    # `make test` draws less than a third of the examples, and `make test-full` all of them.
    settings.register_profile("quick", patient, derandomize=True, database=None, max_examples=30)
    settings.register_profile("patient", patient, derandomize=True, database=None)
    # `--hypothesis-profile full` draws ten times as many.
    settings.register_profile("full", patient, derandomize=True, database=None, max_examples=1000)
    settings.load_profile("quick")


def pytest_addoption(parser):
    parser.addoption(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="Train the gangs of the integration tests on N GPUs, which ranks share, instead of on cores.",
    )


def runs_long_tests(config):
    """Returns whether this is `make test-full`, which repeats property tests with more examples."""
    return config.option.markexpr == "full"


def pytest_configure(config):
    """Chooses the number of examples, before modules with property tests are imported."""
    with suppress(ImportError):
        from hypothesis import settings

        if runs_long_tests(config) and settings.get_current_profile_name() == "quick":
            settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Makes property tests long tests, too."""
    for item in items if runs_long_tests(config) else ():
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("full")


def pytest_collection_finish():
    """Excludes modules, such as torch, from garbage collections, which would examine them hundreds of times."""
    gc.freeze()
    gc.set_threshold(20_000)  # new objects, and not 700: collections are a twentieth of the time
    gc.enable()


@pytest.fixture
def databases_made_anew(monkeypatch):
    """Lets databases of Prefect and MLflow be made by migrations, as by the first process of an installed release."""
    from ringmaster.model_lineage import database_templates

    monkeypatch.setattr(database_templates, "FOLDER", Path(__file__) / "no folder")
