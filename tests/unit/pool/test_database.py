"""What uses a pool's database waits for it, however many there are."""

import threading

from sqlalchemy import func, insert, select

from tasks.pool.database import Database, file_url
from tasks.pool.schema import COMMANDS


def test_where_all_connections_are_taken_whoever_comes_waits_for_one(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    database.write(lambda connection: connection.execute(insert(COMMANDS).values(segment=1, command="stop")))
    connections = database._engine.pool
    most = connections.size() + connections._max_overflow
    connections._timeout = 0.01
    all_busy, over, found = threading.Barrier(most + 1), threading.Event(), []

    def hold(connection):
        all_busy.wait(30)
        over.wait(30)

    def look():
        found.append(database.read(lambda connection: connection.execute(select(func.count(COMMANDS.c.id))).scalar()))

    holders = [threading.Thread(target=database.read, args=(hold,)) for _ in range(most)]
    for thread in holders:
        thread.start()
    all_busy.wait(30)
    latecomer = threading.Thread(target=look)
    latecomer.start()
    latecomer.join(0.2)
    over.set()
    for thread in [*holders, latecomer]:
        thread.join(30)
    assert found == [1]
    database.close()
