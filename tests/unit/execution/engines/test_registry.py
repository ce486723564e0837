"""Engines by name: the built-in ones, and those of an installed distribution."""

import pytest
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.cli import app
from ringmaster.registry import installed
from ringmaster.tasks.execution.engine import Engine, EngineContext, LocalEngine
from ringmaster.tasks.execution.engine_registry import BUILTIN, ENGINES, LOCAL, WORKERS, build_engine
from ringmaster.tasks.pool.pool_engine import PoolEngine
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques.processes.forkserver_client import ForkServer
from tests.fake_engine import FakeEngine
from tests.unit.execution.fakes import cluster

ENTRY_POINTS = """
[ringmaster.engines]
fake = other_engines:build
half = other_engines:Half
local = other_engines:Half
builder = other_engines:Builder
"""
MODULE = """
from tests.fake_engine import FakeEngine

def build(context):
    engine = FakeEngine()
    engine.add(str(context.folder))
    return engine

class Builder(FakeEngine):
    def __init__(self, context):
        super().__init__()

    def build(self, image):
        raise AssertionError("it builds images of nodes, and no engines")

class Half:
    def __init__(self, context): ...
    def nodes(self): ...
    def start(self, call): ...
"""


@pytest.fixture(autouse=True)
def other(tmp_path, monkeypatch):
    """A package that is installed and has further engines."""
    folder = tmp_path / "site-packages"
    (folder / "other-1.0.dist-info").mkdir(parents=True)
    (folder / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "other-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "other_engines.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv(settings.ENGINE, raising=False)
    installed.cache_clear()
    yield
    installed.cache_clear()


@pytest.fixture
def context(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    server = ForkServer()  # not started
    yield EngineContext(folder=tmp_path, cluster=cluster(2), launcher=server, database=database)
    server.close()
    database.close()


def test_an_installed_engine_is_built_from_what_its_host_offers(context):
    engine = build_engine("fake", context)
    assert isinstance(engine, FakeEngine)
    assert [node.name for node in engine.nodes()] == [str(context.folder)]


def test_an_engine_with_a_method_of_its_own_called_build_is_called_itself(context):
    assert isinstance(build_engine("builder", context), FakeEngine)


@pytest.mark.parametrize(("name", "kind"), [(LOCAL, LocalEngine), (WORKERS, PoolEngine)])
def test_a_built_in_engine_is_an_engine_and_cannot_be_shadowed(context, name, kind):
    engine = build_engine(name, context)
    assert type(engine) is kind and isinstance(engine, Engine)
    assert [node.name for node in engine.nodes()] == {LOCAL: ["here"], WORKERS: []}[name]
    engine.request(3), engine.release("here")
    assert engine.is_fenced("here")
    engine.close()


def test_names_are_listed_built_in_ones_first():
    assert tuple(ENGINES.paths()) == (*BUILTIN, "fake", "half", "builder")


def test_an_unknown_engine_is_refused_with_the_known_ones(context):
    with pytest.raises(ValueError, match="unknown engine 'worker': did you mean 'workers'\\? there are local, workers"):
        build_engine("worker", context)


def test_what_is_no_engine_is_refused_with_what_it_lacks(context):
    lacking = "is not an engine: it lacks request, release, is_fenced, adopt, send"
    with pytest.raises(ValueError, match=f"'half' .*{lacking}"):
        build_engine("half", context)


@pytest.mark.parametrize(("name", "message"), [(LOCAL, "`ringmaster run`"), (WORKERS, "`ringmaster up`")])
def test_an_engine_whose_host_lacks_what_it_needs_says_so(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        build_engine(name, EngineContext(folder=tmp_path))


def test_the_environment_chooses_and_an_option_has_the_last_word(monkeypatch):
    assert settings.engine(default="local") == "local"
    monkeypatch.setenv(settings.ENGINE, "fake")
    assert settings.engine(default="local") == "fake"
    settings.choose_engine("")
    assert settings.engine(default="local") == "fake"
    settings.choose_engine("workers")
    assert settings.engine(default="local") == "workers"


@pytest.mark.parametrize("command", [["run", "batch.yaml"], ["pool", "controller"]], ids=" ".join)
@pytest.mark.parametrize("is_option", [True, False])
def test_commands_refuse_an_unknown_engine_before_all_else(monkeypatch, tmp_path, command, is_option):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    monkeypatch.setenv(settings.ENGINE, "fake" if is_option else "slrum")
    done = CliRunner().invoke(app, [*command, *(["--engine", "slrum"] if is_option else [])])
    assert isinstance(done.exception, InputError)
    assert "unknown engine 'slrum': did you mean 'slurm'? there are local, workers, " in str(done.exception)
