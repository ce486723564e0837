"""Writers that are frozen or cut off within a transaction block other writers for seconds, not for hours."""

import threading

from sqlalchemy import func, insert, select

from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import COMMANDS


def test_a_frozen_writer_is_not_waited_for_and_its_transaction_is_tried_again(postgresql_url):
    frozen, thaw = threading.Event(), threading.Event()
    database, other = Database(postgresql_url), Database(postgresql_url, timeout_s=300.0)

    def write(segment):
        return lambda connection: connection.execute(insert(COMMANDS).values(segment=segment, command="stop"))

    def slowly(connection):
        write(1)(connection)
        frozen.set()
        assert thaw.wait(300), "nobody else could write"

    thread = threading.Thread(target=database.write, args=(slowly,))
    thread.start()
    try:
        assert frozen.wait(300)
        other.write(write(2))
        num_rows = other.read(lambda connection: connection.execute(select(func.count(COMMANDS.c.id))).scalar())
        assert num_rows == 1
    finally:
        thaw.set()
        thread.join(300)
    rows = other.read(lambda connection: connection.execute(select(COMMANDS.c.segment)).scalars().all())
    assert sorted(rows) == [1, 2]
    database.close()
    other.close()
