"""The processes of a pool, their settings, and the options that are refused before any of them starts."""

import fnmatch
import shlex
import socket
from dataclasses import replace

import pytest

from ringmaster.errors import InputError
from ringmaster.flows.output import LOG_FORMAT, LogFormat, ProcessRole
from ringmaster.flows.services.service_definitions import (
    PoolDatabases,
    PoolOptions,
    compose,
    databases,
    faults,
    logging_file,
    make_databases,
)
from ringmaster.flows.services.serving import ALLOWED_HOSTS, names_of
from ringmaster.flows.settings import MAX_FLOW_RUNS
from tests.ports import free_port

PASSWORD = "correct horse 100% battery"


@pytest.fixture
def options(tmp_path):
    (tmp_path / "pool").mkdir()
    return PoolOptions(
        home=tmp_path,
        databases=databases(None, home=tmp_path),
        password=PASSWORD,
        port_prefect=(port := free_port()),
        port_mlflow=(other := free_port(but=[port])),
        port_metrics=free_port(but=[port, other]),
    )


def by_name(options):
    return {service.name: service for service in compose(options)}


def test_a_pool_of_one_machine_needs_no_choice(options):
    assert faults(options) == []
    assert list(by_name(options)) == ["prefect", "mlflow", "metrics", "deployments", "controller", "worker"]


def test_services_start_after_what_they_need(options):
    names = []
    for service in compose(options):
        assert set(service.after) <= set(names)
        names.append(service.name)


def test_a_machine_may_hold_the_servers_alone(options):
    assert "worker" not in by_name(replace(options, worker=False))


@pytest.mark.parametrize("given", ["0", "-1", "2.5", "eight", " ", "²", "9" * 5000])
def test_a_limit_of_flow_runs_that_is_no_number_is_refused_before_anything_starts(options, monkeypatch, given):
    monkeypatch.setenv(MAX_FLOW_RUNS, given)
    (fault,) = faults(options)
    assert "is not a valid number of flow runs. To fix: a number such as 8" in fault
    assert len(fault) < 200


def test_faults_are_told_all_at_once(options):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", options.port_prefect))
        taken.listen()
        found = faults(replace(options, password="short"))
    assert len(found) == 2
    assert "12" in found[0]
    assert f"port {options.port_prefect} of 127.0.0.1 cannot be used for prefect: Address already in use" in found[1]
    assert "--port-prefect" in found[1]


@pytest.mark.parametrize("name", ["mlflow", "metrics"])
def test_two_servers_cannot_share_a_port(options, name):
    (fault,) = faults(replace(options, **{f"port_{name}": options.port_prefect}))
    assert fault == f"--port-prefect and --port-{name} are both {options.port_prefect}"


def test_an_address_of_another_machine_is_refused(options):
    found = faults(replace(options, host="192.0.2.1"))
    assert "Cannot assign requested address" in found[0]


def test_every_process_belongs_to_the_pool_and_keeps_no_pickles(options):
    for service in compose(options):
        said = service.environment
        assert said["PREFECT_API_URL"] == f"http://127.0.0.1:{options.port_prefect}/api"
        assert said["RINGMASTER_DATABASE"] == f"sqlite:///{options.home}/pool/pool.db"
        assert said["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
        assert said["PREFECT_RESULTS_PERSIST_BY_DEFAULT"] == "true"
        assert said["DO_NOT_TRACK"] == said["MLFLOW_DISABLE_TELEMETRY"] == "true"
        assert said["RINGMASTER_HOME"] == str(options.home)


def test_servers_ask_for_the_password_and_their_clients_know_it(options):
    every = by_name(options)
    assert every["prefect"].environment["PREFECT_SERVER_API_AUTH_STRING"] == f"ringmaster:{PASSWORD}"
    assert every["mlflow"].command[-2:] == ("--app-name", "basic-auth")
    assert len(every["mlflow"].environment["MLFLOW_FLASK_SERVER_SECRET_KEY"]) >= 32
    for client in ("metrics", "deployments", "controller", "worker"):
        said = every[client].environment
        assert said["PREFECT_API_AUTH_STRING"] == f"ringmaster:{PASSWORD}"
        assert (said["MLFLOW_TRACKING_USERNAME"], said["MLFLOW_TRACKING_PASSWORD"]) == ("ringmaster", PASSWORD)


def test_no_argument_that_others_can_read_holds_a_secret(options):
    secret = PoolDatabases(
        pool="postgresql://u:secret@h/d",
        prefect="postgresql+asyncpg://u:secret@h/p",
        mlflow="postgresql://u:secret@h/m",
    )
    for service in compose(replace(options, databases=secret)):
        assert not any("secret" in word or PASSWORD in word for word in service.command)
    assert "secret" not in repr(secret)
    assert PASSWORD not in repr(options)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1", "node7.example.org"])
def test_the_servers_are_asked_for_by_their_own_names_alone(options, host):
    every = by_name(replace(options, host=host))
    for name in ("prefect", "metrics"):
        assert every[name].environment[ALLOWED_HOSTS].split(",") == [*names_of(host)]
    allowed = every["mlflow"].environment["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")

    def takes(asked):  # as MLflow does
        return any(fnmatch.fnmatch(asked, each) if "*" in each else asked == each for each in allowed)

    own = f"[{host}]" if ":" in host else host
    assert all(takes(name) for name in ("localhost", "127.0.0.1:5000", "[::1]:8080", own, f"{own}:5000"))
    assert not any(takes(name) for name in ("evil.example", "10.evil.example", "localhost.evil.example:5000", ""))


def test_who_listens_everywhere_may_be_asked_for_by_all_names_of_the_machine():
    assert {"127.0.0.1", "localhost", socket.gethostname()} <= set(names_of("0.0.0.0"))


def test_a_reverse_proxy_has_a_name_of_its_own(options, monkeypatch):
    monkeypatch.setenv(ALLOWED_HOSTS, "pool.example.org, [2001:db8::1]")
    every = by_name(options)
    assert every["prefect"].environment[ALLOWED_HOSTS].split(",")[-2:] == ["pool.example.org", "2001:db8::1"]
    assert "pool.example.org" in every["mlflow"].environment["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")


def test_who_listens_everywhere_is_reached_by_name(options):
    everywhere = replace(options, host="0.0.0.0")
    assert everywhere.address().mlflow_uri == f"http://{socket.gethostname()}:{options.port_mlflow}"
    assert by_name(everywhere)["mlflow"].ready_url == f"http://127.0.0.1:{options.port_mlflow}/health"


def test_addresses_of_ipv6_stand_in_brackets(options):
    assert replace(options, host="::1").address().prefect_api == f"http://[::1]:{options.port_prefect}/api"


def test_databases_have_the_drivers_that_their_readers_want(tmp_path):
    found = databases("postgresql://u:p%40ss@db:5433/nightly?sslmode=require", home=tmp_path)
    assert found.pool == "postgresql://u:p%40ss@db:5433/nightly?sslmode=require"
    assert found.prefect == "postgresql+asyncpg://u:p%40ss@db:5433/nightly_prefect?ssl=require"
    assert found.mlflow == "postgresql+psycopg://u:p%40ss@db:5433/nightly_mlflow?sslmode=require"


@pytest.mark.parametrize("name", ["", "/", "/postgres"])
def test_databases_have_a_name_where_none_is_given(tmp_path, name):
    assert databases(f"postgresql://u@db{name}", home=tmp_path).pool == "postgresql://u@db/ringmaster"


@pytest.mark.parametrize("url", ["mysql://u@db/x", "sqlite:///file", "postgresql:///x", "nonsense"])
def test_what_is_no_postgresql_server_is_refused(tmp_path, url):
    with pytest.raises(InputError, match="postgresql://USER@HOST:PORT/NAME"):
        databases(url, home=tmp_path)


def test_a_server_that_is_away_is_told_without_the_password():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # the port is taken, but nobody listens
        port = closed.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port} cannot be used") as caught:
            make_databases(f"postgresql://u:secret@127.0.0.1:{port}/x")
    assert "secret" not in str(caught.value)


def test_every_variable_that_is_set_is_a_text_or_taken_away(options):
    for service in compose(options):
        assert all(value is None or isinstance(value, str) for value in service.environment.values())


@pytest.mark.parametrize("wanted", LogFormat)
def test_all_processes_log_in_the_format_that_was_chosen(options, wanted):
    services = compose(replace(options, log_format=wanted))
    assert {service.environment[LOG_FORMAT] for service in services} == {wanted.value}


def test_prefect_is_given_the_configuration_of_its_json_log(options):
    name = "PREFECT_LOGGING_SETTINGS_PATH"
    prefect = by_name(replace(options, log_format=LogFormat.JSON))["prefect"]
    assert prefect.environment[name] == str(logging_file(options.folder, ProcessRole.PREFECT))
    assert name not in by_name(options)["prefect"].environment


def test_mlflow_is_given_the_configuration_of_its_json_log(options):
    mlflow = by_name(replace(options, log_format=LogFormat.JSON))["mlflow"]
    place = mlflow.command.index("--uvicorn-opts")
    assert shlex.split(mlflow.command[place + 1]) == [
        "--log-config",
        str(logging_file(options.folder, ProcessRole.MLFLOW)),
    ]
    assert mlflow.environment["MLFLOW_CONFIGURE_LOGGING"] == "false"
    assert "--uvicorn-opts" not in by_name(options)["mlflow"].command
