"""The password of a pool's servers: drawn if none is given, readable by its owner alone, known to MLflow."""

import configparser
import stat

import pytest

from ringmaster.errors import InputError
from ringmaster.flows.services.service_files import (
    SHORTEST_PASSWORD,
    choose_password,
    keep_password,
    password_file,
    read_password,
)

PASSWORD = "correct horse 100% battery"


def keep(folder, password):
    keep_password(folder, username="ringmaster", password=password)


@pytest.fixture
def given(tmp_path):
    """A password file that a user wrote."""
    file = tmp_path / "given"
    file.write_text(f"{PASSWORD}\n")
    file.chmod(0o600)
    return file


def test_a_password_is_drawn_where_nobody_gives_one(tmp_path):
    drawn = {choose_password(tmp_path, given=None) for _ in range(10)}
    assert len(drawn) == 10
    assert all(len(password) >= 2 * SHORTEST_PASSWORD for password in drawn)


def test_the_password_of_the_last_time_is_used_again(tmp_path):
    password = choose_password(tmp_path, given=None)
    keep(tmp_path, password)
    assert choose_password(tmp_path, given=None) == password


def test_what_is_given_goes_before_what_was_kept(tmp_path, given):
    keep(tmp_path, "what it was before")
    assert choose_password(tmp_path, given=given) == PASSWORD


def test_choosing_writes_nothing(tmp_path, given):
    choose_password(tmp_path, given=None)
    choose_password(tmp_path, given=given)
    assert list(tmp_path.iterdir()) == [given]


def test_the_password_and_mlflows_user_are_written_for_their_owner_alone(tmp_path):
    keep(tmp_path, PASSWORD)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert password_file(tmp_path).read_text() == f"{PASSWORD}\n"
    ini = configparser.ConfigParser()
    ini.read(tmp_path / "mlflow-auth.ini")
    assert (ini["mlflow"]["admin_username"], ini["mlflow"]["admin_password"]) == ("ringmaster", PASSWORD)


def test_another_password_than_mlflows_users_were_made_with_is_refused(tmp_path):
    keep(tmp_path, PASSWORD)
    (tmp_path / "mlflow-users.db").touch()
    keep(tmp_path, PASSWORD)
    with pytest.raises(InputError, match=r"To fix: give that one by --password-file, or remove .*mlflow-users\.db"):
        keep(tmp_path, "another password")
    assert choose_password(tmp_path, given=None) == PASSWORD


def test_a_password_is_one_line_that_nobody_else_can_read(tmp_path, given):
    assert read_password(given) == PASSWORD
    given.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        read_password(given)
    given.chmod(0o600)
    given.write_text("")
    with pytest.raises(InputError, match="one line"):
        read_password(given)
    with pytest.raises(InputError, match="No such file"):
        read_password(tmp_path / "none")
