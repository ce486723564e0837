"""The options that quotas add to the commands of others."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.planning.families import draw
from ringmaster.errors import InputError
from ringmaster.features.quotas import commands
from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.quotas.pool_quotas import quotas_of_pool
from ringmaster.features.what_if.commands import whatif
from ringmaster.flows.commands.parameters import internal
from ringmaster.flows.pool.batch_requests import open_database, pool_address
from tests.unit.pool.bench import set_pool


def run(command, *arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("ana", "--add-quota 'ana' is not a user and a number of devices. To fix"),
        ("ana:1", "'ana' has no quota"),
    ],
)
def test_a_quota_that_cannot_grow_is_refused(tmp_path, option, says):
    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps(draw("tiny-4x2").to_json()))
    error = run(commands.with_more_quotas(whatif), problem, "--work", 0.1, "--at-once", "--add-quota", option).exception
    assert isinstance(error, InputError)
    assert says in str(error)


def started(when_up=()):
    """A command that has a pool up at once."""
    for call in when_up:
        call()


def test_quotas_are_set_once_the_pool_is_up(tmp_path, monkeypatch):
    set_pool(monkeypatch, tmp_path)
    up = commands.with_quotas(internal("when_up")(started))
    assert isinstance(run(up, "--quota", "ana:4", "--quota", "ben").exception, InputError)
    done = run(up, "--quota", "ana:4", "--quota", "ben:50%")
    assert done.exit_code == 0, done.output
    with open_database(pool_address()) as database:
        assert quotas_of_pool(database).users == {"ana": UserQuota(max_devices=4), "ben": UserQuota(share=0.5)}
