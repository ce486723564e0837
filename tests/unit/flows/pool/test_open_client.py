"""A client of Prefect that stays open between its uses. No server answers here: opening a client asks none."""

import pytest

pytest.importorskip("prefect")

from prefect.settings import PREFECT_API_URL, temporary_settings

from ringmaster.flows.pool.segment_runs import OpenClient


@pytest.fixture
def prefect():
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        prefect = OpenClient()
        yield prefect
        prefect.close()


def test_it_stays_open_between_uses(prefect):
    with prefect.use() as first:
        pass
    with prefect.use() as second:
        assert second is first
        assert not second._client.is_closed


def test_an_error_closes_it_and_the_next_use_opens_another_one(prefect):
    with pytest.raises(ConnectionError), prefect.use() as first:
        raise ConnectionError("Prefect is away")
    assert first._client.is_closed
    with prefect.use() as second:
        assert not second._client.is_closed


def test_closing_it_twice_does_nothing(prefect):
    with prefect.use() as client:
        pass
    prefect.close()
    prefect.close()
    assert client._client.is_closed
