"""The endpoint that the tests of a module share, and a client of it."""

import pytest

from tests.unit.serving.clients import running


@pytest.fixture(scope="module")
def served_endpoint(tmp_path_factory):
    with running(tmp_path_factory.mktemp("home"), owners=["ann", "bob"], max_adapters=60) as result:
        yield result


@pytest.fixture
def client(served_endpoint):
    return served_endpoint.client()
