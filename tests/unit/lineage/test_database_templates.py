"""New databases are copies of one that was migrated once, as long as it is whole and of the installed release."""

import sqlite3
from contextlib import closing

import pytest

from ringmaster.model_lineage import database_templates
from ringmaster.model_lineage.database_templates import create_from_template


class Release:
    """A package with one migration, which counts how often it was applied."""

    def __init__(self, folder):
        self.folder, self.num_made = folder, 0
        self.migration = folder / "site" / "tables" / "versions" / "first.py"
        self.migration.parent.mkdir(parents=True)
        (folder / "site" / "tables" / "__init__.py").touch()
        self.migration.write_text("CREATE TABLE run (id TEXT)")
        self.install("1.0")

    def install(self, version):
        information = self.folder / "site" / "tables.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tables\nVersion: {version}\n")

    def create(self, name):
        """Creates a database, and returns the rows of its table, and whether it was made by migrations."""
        file, before = self.folder / name, self.num_made
        create_from_template(file, migrations="tables:versions", make=lambda: self._make(file), emptied=("place",))
        with closing(sqlite3.connect(file)) as database:
            rows = [database.execute(f"SELECT * FROM {table}").fetchall() for table in ("run", "place")]
        return rows, self.num_made > before

    def _make(self, file):
        self.num_made += 1
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            with database:
                database.execute(self.migration.read_text())
                database.execute("CREATE TABLE place (folder TEXT)")
                database.execute("INSERT INTO place VALUES ('/of/this/process')")


@pytest.fixture
def release(tmp_path, monkeypatch):
    monkeypatch.setattr(database_templates, "FOLDER", tmp_path / "templates")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return Release(tmp_path)


def test_a_second_database_is_a_copy_of_the_first_without_its_rows(release):
    assert release.create("first.db") == ([[], [("/of/this/process",)]], True)
    assert release.create("second.db") == ([[], []], False)


@pytest.mark.parametrize("change", ["version", "migrations"])
def test_of_another_release_it_is_made_anew(release, change):
    release.create("first.db")
    if change == "version":
        release.install("1.1")
    else:
        release.migration.write_text("CREATE TABLE run (id TEXT, name TEXT)")
    assert release.create("second.db")[1]
    assert not release.create("third.db")[1]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"", lambda content: content[::-1]])
def test_a_damaged_one_is_made_anew(release, damage):
    release.create("first.db")
    (template,) = (release.folder / "templates").iterdir()
    template.write_bytes(damage(template.read_bytes()))
    assert release.create("second.db")[1]
    assert not release.create("third.db")[1]


def test_where_it_cannot_be_kept_each_database_is_made_by_migrations(release):
    (release.folder / "templates").touch()
    assert release.create("first.db")[1]
    assert release.create("second.db")[1]


def test_a_migration_that_fails_leaves_none(release):
    release.migration.write_text("CREATE")
    with pytest.raises(sqlite3.OperationalError):
        release.create("first.db")
    assert not (release.folder / "templates").exists()
