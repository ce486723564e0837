"""The addresses that `ringmaster up` prints for a running pool."""

import json

import pytest

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.commands.pool import _print_address
from ringmaster.flows.services.service_files import keep_password
from ringmaster.flows.settings import PoolAddress

PASSWORD = "correct horse battery"


@pytest.fixture
def tell(tmp_path, capsys):
    """A function that prints the address of a pool, and returns stdout and stderr."""

    def tell(*, password, as_json=False):
        address = PoolAddress(
            database="d", prefect_api="http://127.0.0.1:4200/api", mlflow_uri="http://127.0.0.1:5000", password=password
        )
        settings.pool_file(tmp_path).write_text(json.dumps(to_json(address)))
        _print_address(tmp_path, as_json)
        return capsys.readouterr()

    return tell


@pytest.mark.parametrize("as_json", [False, True])
def test_where_the_password_is_and_how_each_page_asks_for_it(tell, tmp_path, as_json):
    (tmp_path / "pool").mkdir()
    keep_password(tmp_path / "pool", username="ringmaster", password=PASSWORD)
    said = tell(password=PASSWORD, as_json=as_json)
    assert "http://127.0.0.1:4200" in said.out and "http://127.0.0.1:5000" in said.out
    assert f"`cat {tmp_path}/pool/password`" in said.err
    assert "ringmaster:PASSWORD" in said.err
    assert PASSWORD not in said.out + said.err
    page = "http://127.0.0.1:5000/#/experiments?workflowType=machine_learning"
    assert (page in said.out) is not as_json, "a page for users, an address for programs"
    if as_json:
        assert json.loads(said.out)["mlflow"] == "http://127.0.0.1:5000"
        assert json.loads(said.out)["password_file"] == str(tmp_path / "pool" / "password")


def test_a_password_that_is_kept_nowhere_is_the_one_that_was_given(tell):
    assert "the one that this pool was started with" in tell(password=PASSWORD).err
