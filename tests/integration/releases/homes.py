"""Unpacks the archives of this folder: a home and a pool's home that release 0.1.0 made in MADE_IN, on two CPU slots.

home-0.1: the batch `done` (done.yaml) has ended, the batch `cut` (cut.yaml) was stopped by Ctrl-C at step 195 of 4,000.
pool-0.1: the batch `pooled` was submitted, and the pool was stopped by `down` at step 2,493 of 20,000. Passwords, logs
and files of processes are left out.
"""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).parent
MADE_IN = "/srv/ringmaster-0.1"
DEVICE_NAME, DEVICE_KIND = "AMD EPYC", "AMD EPYC, 1 core"


def unpack(name, *, to, kind=DEVICE_KIND):
    """Unpacks an archive as if the release had run in `to`, on devices of that kind."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(to, filter="data")
    for file in to.rglob("*.db"):
        _replace(file, {MADE_IN: str(to), DEVICE_KIND: kind})
    for file in to.rglob("submitted-*.json"):
        file.write_text(file.read_text().replace(MADE_IN, str(to)))


def _replace(file, replaced):
    """Replaces texts in all columns of a database."""
    with closing(sqlite3.connect(file)) as database, database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = [(row[1], row[2].upper()) for row in database.execute(f'PRAGMA table_info("{table}")')]
            for column, kind in columns:
                if any(text in kind for text in ("CHAR", "TEXT", "JSON", "CLOB")):
                    for old, new in replaced.items():
                        database.execute(
                            f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?) WHERE instr("{column}", ?)',
                            (old, new, old),
                        )
