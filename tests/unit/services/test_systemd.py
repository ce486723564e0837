"""The example systemd units start the same processes as `ringmaster up`, with the same environment."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from ringmaster.flows import cli
from ringmaster.flows.services.service_definitions import PoolOptions, compose, databases

FOLDER = Path(__file__).parents[3] / "docs" / "systemd"
UNITS = {path.stem.removeprefix("ringmaster-"): path for path in FOLDER.glob("*.service")}
OPTIONS = PoolOptions(
    home=Path("/srv/ringmaster"),
    databases=databases("postgresql://ringmaster:DBPASSWORD@10.0.0.1:5432/ringmaster", home=Path("/srv/ringmaster")),
    host="10.0.0.1",
    password="PASSWORD",
)
SERVICES = {service.name: service for service in compose(OPTIONS)}
OF_ITS_OWN = ("MLFLOW_FLASK_SERVER_SECRET_KEY",)


class Unit:
    """The entries of a unit file. A key may occur several times."""

    def __init__(self, path):
        self.pairs = re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE)

    def all(self, key):
        return [value for name, value in self.pairs if name == key]

    def environment(self):
        found = {}
        for file in self.all("EnvironmentFile"):
            found |= dict(re.findall(r"^(\w+)=(.*)$", (FOLDER / Path(file).name).read_text(), re.MULTILINE))
        return {name: value for name, value in found.items() if name not in self.all("UnsetEnvironment")}


def test_there_is_a_unit_for_each_service_that_stays():
    assert set(UNITS) == {name for name, service in SERVICES.items() if not service.once}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_told_what_up_tells_its_service(name):
    wanted = {key: value for key, value in SERVICES[name].environment.items() if value is not None}
    said = Unit(UNITS[name]).environment()
    assert set(wanted) <= set(said)
    assert {k: said[k] for k in wanted if k not in OF_ITS_OWN} == {k: wanted[k] for k in wanted if k not in OF_ITS_OWN}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_what_up_starts(name):
    (line,) = Unit(UNITS[name]).all("ExecStart")
    words = shlex.split(line.replace("${HOST}", OPTIONS.host))
    ours = list(SERVICES[name].command)
    start = ours.index("ringmaster.flows.entry") + 1 if "ringmaster.flows.entry" in ours else ours.index("-m")
    assert words[words.index("-m") if "-m" in words else 1 :] == ours[start:]


def test_the_deployments_are_made_before_the_executor_starts():
    (line,) = Unit(UNITS["controller"]).all("ExecStartPre")
    assert shlex.split(line)[1:] == list(SERVICES["deployments"].command)[1:]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_waits_longer_for_an_end_than_the_service_takes(name):
    (timeouts,) = Unit(UNITS[name]).all("TimeoutStopSec")
    assert float(timeouts) >= SERVICES[name].grace_s


@pytest.mark.parametrize("name", UNITS)
def test_units_are_well_formed(name):
    parser = configparser.RawConfigParser(strict=False)
    parser.read(UNITS[name])
    assert parser.sections() == ["Unit", "Service", "Install"]
    commands = {info.name or info.callback.__name__ for info in cli.app.registered_commands if info.callback}
    commands |= {group.name for group in cli.app.registered_groups}
    for command in re.findall(r"bin/ringmaster (\w+)", UNITS[name].read_text()):
        assert command in commands
