"""SQLite files: URLs of paths, and faults with remedies that help."""

import os
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from ringmaster.model_lineage import sqlite_files
from ringmaster.model_lineage.ledger.connection import MIGRATIONS, sqlite_file
from ringmaster.model_lineage.sqlite_files import fault_of, path_of, sqlite_url, unfit_characters

NAMES = ["feature%2Ffoo", "a%b", "a b", "a#b", "a@b", "a:b", "a+b", "a'b", 'a"b', "a\\b", "ünï", "~", "a&b=c;d", "[a]*"]


@pytest.mark.parametrize("name", NAMES)
def test_a_database_is_created_where_its_path_says(tmp_path, name):
    file = tmp_path / name / "x.db"
    file.parent.mkdir()
    with create_engine(sqlite_url(file)).connect() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.db")] == [file.relative_to(tmp_path)]
    assert sqlite_file(sqlite_url(file)) == file


@given(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=30).filter(lambda name: name.strip(".")))
def test_a_path_is_found_again_in_its_url_or_refused(name):
    file = Path("/home", name, "x.db")
    if characters := unfit_characters(file):
        with pytest.raises(ValueError, match="To fix") as refused:
            sqlite_url(file)
        assert characters in str(refused.value)
        assert str(refused.value).isprintable()
    else:
        assert path_of(sqlite_url(file)) == make_url(sqlite_url(file)).database == str(file)


@pytest.mark.parametrize("name", ["a?b", "a\nb", "a\x1bb", "a\udce4b"])
def test_what_no_url_can_name_is_refused_with_its_characters(name):
    with pytest.raises(ValueError, match=r"has '") as refused:
        sqlite_url(Path("/home", name))
    assert ascii(name[1]) in str(refused.value)


def written(file, version="84291f40a231"):
    """Writes a database with tables of a version."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
        connection.execute("CREATE TABLE filling (x BLOB)")
        connection.execute("INSERT INTO filling VALUES (randomblob(40000))")
        connection.commit()
    return file


def of_mlflow(file):
    return fault_of(file, contents="records", versions=MIGRATIONS)


def shortened(file):
    os.truncate(file, file.stat().st_size // 2)


def overwritten(file):
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xff" * 8192)


def of_other_tables(file):
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE alembic_version")


def of_a_later_release(file):
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")


DAMAGES = {
    shortened: "damaged",
    overwritten: "damaged",
    lambda file: file.write_text("text " * 400): "not a SQLite database",
    of_other_tables: "other tables",
    of_a_later_release: "another release of mlflow, whose version ffffffffffff",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=list(DAMAGES.values()))
def test_the_remedy_of_a_damaged_database_helps(tmp_path, damage):
    (tmp_path / "my home").mkdir()
    file = written(tmp_path / "my home" / "mlflow.db")
    assert of_mlflow(file) is None
    damage(file)
    (tmp_path / "my home" / "mlflow.db-journal").touch()
    fault = of_mlflow(file)
    assert DAMAGES[damage] in fault
    assert len(fault.splitlines()) == 1
    subprocess.run(fault[fault.index("mkdir") :], shell=True, check=True, cwd=tmp_path)
    assert of_mlflow(file) is None
    assert [*file.parent.iterdir()] == []  # a journal that stays would be applied to the next database


def test_an_earlier_version_and_an_empty_file_are_left_to_their_program(tmp_path):
    assert of_mlflow(written(tmp_path / "old.db", version="451aebb31d03")) is None
    (tmp_path / "empty.db").touch()
    assert of_mlflow(tmp_path / "empty.db") is None
    assert of_mlflow(tmp_path / "none.db") is None


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "nothing")
    for place, said in ((tmp_path, "is not a file"), (tmp_path / "link.db", "link to a file that does not exist")):
        assert said in of_mlflow(place)


def test_a_read_only_database_is_refused(tmp_path, monkeypatch):
    file = written(tmp_path / "mlflow.db")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file)  # root may write everything
    assert "cannot be written by this user" in of_mlflow(file)


def test_a_locked_database_names_who_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_files, "TIMEOUT_S", 0.0)
    file = written(tmp_path / "mlflow.db")
    holder = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE'); print(flush=True)"
    command = [sys.executable, "-c", f"{holder}; input()", str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        fault = of_mlflow(file)
        process.communicate(b"\n")
    assert f"locked by another process (process {process.pid}, " in fault
    assert of_mlflow(file) is None


def test_the_remedy_of_a_deleted_experiment_helps(tmp_path):
    from click.testing import CliRunner
    from mlflow.cli import cli

    from ringmaster.errors import LedgerError
    from ringmaster.model_lineage import Ledger

    home = tmp_path / "it's 100%2F home"
    ledger = Ledger(sqlite_url(home / "mlflow.db"), artifact_root=home / "mlartifacts")
    ledger.warm_up()
    for name in ("ringmaster", "ringmaster/tonight", "ringmaster-profiles"):
        ledger.client.delete_experiment(ledger.experiment_id(name))
        with pytest.raises(LedgerError, match="was deleted in MLflow") as refused:
            Ledger(ledger.tracking_uri).warm_up(batch="tonight")
        variable, program, *options = shlex.split(str(refused.value).partition("To fix: ")[2])
        assert program == "mlflow"
        assert CliRunner(env=dict([variable.split("=", 1)])).invoke(cli, options).exit_code == 0
        Ledger(ledger.tracking_uri).warm_up(batch="tonight")
