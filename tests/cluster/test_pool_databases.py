"""Databases of a pool on PostgreSQL: they are created where missing, or the message names who must create them."""

import psycopg
import pytest
from sqlalchemy.engine import make_url

from ringmaster.errors import InputError
from ringmaster.flows.services.service_definitions import make_databases


@pytest.fixture
def poor(postgresql):
    """A user without the right to create databases."""
    with psycopg.connect(postgresql.url("postgres"), autocommit=True) as connection:
        connection.execute("CREATE ROLE poor LOGIN PASSWORD 'poor'")
        yield lambda name: make_url(postgresql.url(name)).set(username="poor", password="poor")
        connection.execute("DROP ROLE poor")


def test_databases_are_made_once(postgresql):
    url = postgresql.url("once")
    try:
        assert make_databases(url) == ["once", "once_prefect", "once_mlflow"]
        assert make_databases(url) == []
    finally:
        for name in ("once", "once_prefect", "once_mlflow"):
            postgresql.drop(name)


def test_who_may_not_make_them_is_told_what_to_have_done(postgresql, poor):
    url = poor("theirs")
    with pytest.raises(InputError) as caught:
        make_databases(url.render_as_string(hide_password=False))
    (fault,) = caught.value.faults
    commands = [line.strip() for line in fault.splitlines()[1:]]
    with psycopg.connect(postgresql.url("postgres"), autocommit=True) as connection:
        for command in commands:
            connection.execute(command)
    try:
        assert make_databases(url.render_as_string(hide_password=False)) == []
    finally:
        for name in ("theirs", "theirs_prefect", "theirs_mlflow"):
            postgresql.drop(name)


def test_a_wrong_password_is_told(postgresql, poor):
    url = poor("theirs").set(password="wrong")
    with pytest.raises(InputError, match='password authentication failed for user "poor"'):
        make_databases(url.render_as_string(hide_password=False))
