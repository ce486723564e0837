"""Every command of the command line in a home whose pool cannot be used: it ends, and says why where it needs the pool.

The commands are those of the application: a new one is covered. Those that would train do so in other tests.
"""

import json
import os
import platform
from dataclasses import replace

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ringmaster.errors import InputError, RingmasterError
from ringmaster.flows import cli, settings
from ringmaster.flows.services import server_answers
from ringmaster.flows.services.pool_processes import PoolProcesses

DATA = {"data": {"source": "digits"}}
JOB = {
    "model": {"architecture": "ViTForImageClassification", "config": {"hidden_size": 8, "num_hidden_layers": 1}},
    "num_steps": 1,
}
FILES = {
    "batch_file": {"name": "night", "jobs": [{"name": "vit", **JOB, **DATA}]},
    "sweep_file": {
        "name": "sweep",
        "template": {"job": {**JOB, **DATA}},
        "num_trials": 2,
        "space": {"optimizer.lr": [0.1, 0.2]},
    },
    "models_file": {"name": "production", "models": [{"name": "vit", "job": JOB, **DATA}]},
}
VALUES = {"date": "2026-11-01", "jobs": "vit", "job": "vit", "words": "priority=2", "test": "true", "to": "hf"}
SERVICES = ("up", "page", "pool controller", "pool worker", "pool calibrate")
"""They make a pool, serve one or the page of a home, and wait for it for as long as it takes."""
TRAINING = ("run", "sweep", "retrain", "profile")
"""They continue without a pool that has ended, if its records are in files of the home."""


def commands():
    """Yields the names of all commands and their required parameters."""
    groups = [((), get_command(cli.app))]
    while groups:
        path, group = groups.pop()
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                groups.append(((*path, name), command))
            else:
                yield " ".join((*path, name)), [each for each in command.params if each.required]


COMMANDS = {name: parameters for name, parameters in commands() if name not in SERVICES}


def arguments_of(name, folder):
    """Returns the arguments of a call that no check of its input refuses before the pool is needed."""
    result = name.split()
    for parameter in COMMANDS[name]:
        if parameter.name.endswith("_file"):
            value = folder / f"{parameter.name}.yaml"
            value.write_text(json.dumps(FILES.get(parameter.name, FILES["batch_file"])))
        else:
            value = VALUES.get(parameter.name, "night.vit")
        is_option = parameter.param_type_name == "option"
        result += [*(parameter.opts[:1] if is_option else ()), str(value)]
    return result


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The environment is restored, which commands change; nothing is warned of already."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("RINGMASTER_", "PREFECT_", "MLFLOW_")):
            monkeypatch.delenv(name)
    settings._warn.cache_clear()
    settings._check_servers.cache_clear()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def questions(monkeypatch):
    """The homes whose pool a command has looked for."""
    result = []
    fault = PoolProcesses.fault
    monkeypatch.setattr(PoolProcesses, "fault", lambda self: result.append(self.folder) or fault(self))
    return result


@pytest.fixture
def call(home, tmp_path, monkeypatch):
    """Calls a command as `ringmaster` does; returns its exit code and all that it says."""
    monkeypatch.chdir(tmp_path)

    def call(name):
        waiting = server_answers.timeout_s.set(0.0)
        try:
            done = CliRunner().invoke(cli.app, arguments_of(name, tmp_path))
        finally:
            server_answers.timeout_s.reset(waiting)
        assert done.exception is None or isinstance(done.exception, SystemExit | RingmasterError), done.exc_info
        is_refused = isinstance(done.exception, InputError)
        code = 2 if is_refused else 1 if isinstance(done.exception, RingmasterError) else done.exit_code
        return code, f"{done.output}\n{done.exception or ''}"

    return call


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in TRAINING])
def test_where_all_processes_were_killed(home, call, questions, name):
    home.kill()
    code, said = call(name)
    assert code in (0, 1, 2)
    if questions and name not in ("down", "diagnose"):  # which have nothing to do, or collect what there is
        assert "it ended without `ringmaster down`" in said and "`ringmaster up`" in said
    else:
        assert code in (0, 2)


@pytest.mark.parametrize("name", COMMANDS)
def test_where_nothing_is_known_and_no_server_answers(home, call, questions, name):
    home.kill()
    home.move("machine")
    code, said = call(name)
    if questions and name not in ("down", "diagnose"):
        is_report = name in ("status", "logs")
        assert f"not-{platform.node()}" in said
        assert ("its servers do not answer" if is_report else "have not answered for 0 s (Connection refused)") in said
        assert is_report or (code == 1 and "To fix: `ringmaster status` and `ringmaster up` there" in said)
    else:
        assert code in (0, 2) and name not in TRAINING


@pytest.mark.parametrize("name", TRAINING)
def test_where_the_records_are_on_a_server_nothing_is_trained_without_it(home, call, name):
    home.name(replace(home.address, database="postgresql://db/ringmaster"))
    home.kill()
    code, said = call(name)
    assert code == 2 and "it ended without `ringmaster down`" in said
