"""Promotions that are killed with their process, and how another process completes them."""

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
import sqlalchemy as sa

from ringmaster.errors import LedgerError, PromotionRefused
from ringmaster.tasks.retraining.promotion import AliasMove, DecisionRecord, MoveLog
from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.promotion.fakes import Died, FakeLedger, version

NAME = "shop.prices"
MOVES = [AliasMove(alias="champion", version=2), AliasMove(alias="challenger", version=2)]
DECISION = DecisionRecord(version=2, outcome="promoted", reasons=("better",), champion_before=1)


class Pausing(FakeLedger):
    """A ledger that signals an alias move that is about to start, and then waits to be killed."""

    def __init__(self, ready):
        super().__init__([version(1), version(2)], champion=1)
        self.ready = ready

    def set_alias(self, name, alias, number):
        self.ready.set()
        signal.pause()


def promote_and_pause(file, ready):
    MoveLog(Database(file_url(file))).move(Pausing(ready), NAME, MOVES, DECISION)


@pytest.fixture
def log(tmp_path):
    database = Database(file_url(tmp_path / "promotions.db"))
    notices = []
    log = MoveLog(database, notice=notices.append)
    log.notices = notices
    yield log
    database.close()


def test_a_promotion_that_was_killed_is_finished_by_another_process_and_never_before(log, tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=promote_and_pause, args=(tmp_path / "promotions.db", ready))
    process.start()
    assert ready.wait(300)
    ledger = FakeLedger([version(1), version(2), version(3)], champion=1)
    assert log.finish_left_behind(ledger) == []  # its process is alive
    with pytest.raises(PromotionRefused, match=f"of process {process.pid} on"):
        log.move(ledger, NAME, [AliasMove(alias="champion", version=3)], DECISION)
    assert ledger.aliases == {"champion": 1}
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert log.finish_left_behind(ledger) == [NAME]
    assert ledger.aliases == {"champion": 2, "challenger": 2}


def test_a_promotion_of_another_model_is_not_in_the_way(log):
    ledger = FakeLedger([version(2), version(2, name="shop.other")])

    class Inner(FakeLedger):
        def set_alias(self, name, alias, number):
            super().set_alias(name, alias, number)
            decision = DecisionRecord(version=2, outcome="kept", reasons=())
            log.move(ledger, "shop.other", [AliasMove(alias="challenger", version=2)], decision)

    log.move(Inner([version(2)]), NAME, MOVES[:1], replace(DECISION, champion_before=None))
    assert ledger.aliases == {"challenger": 2}


def test_a_promotion_that_others_have_overtaken_since_it_broke_is_not_finished(log):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], champion=1, moves_left=0)
    with pytest.raises(Died):
        log.move(ledger, NAME, MOVES, DECISION)
    ledger.aliases["champion"], ledger.moves_left = 3, 1000  # by a home that cannot see this record
    assert log.finish_left_behind(ledger) == []
    assert ["version 3 by now, not 1" in text for text in log.notices] == [True]
    assert ledger.aliases == {"champion": 3}
    assert log.finish_left_behind(ledger) == []


DAMAGE = {"moves": ["no JSON", "null", "[{}]"], "decision": ["no JSON", "[]", "{}", '{"version": 2, "later": 1}']}


@pytest.mark.parametrize(("column", "content"), [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_move_is_set_aside_and_said_and_those_of_other_models_are_finished(log, column, content):
    others = [version(i, name="shop.other") for i in (1, 2)]
    ledger = FakeLedger([*others, version(1), version(2)], champion=1, moves_left=0)
    for name in (NAME, "shop.other"):
        with pytest.raises(Died):
            log.move(ledger, name, MOVES, DECISION)
    log._database.write(
        lambda c: c.execute(sa.text(f"UPDATE alias_moves SET {column} = :x WHERE model = '{NAME}'"), {"x": content})
    )
    ledger.moves_left = 1000
    assert log.finish_left_behind(ledger) == ["shop.other"]
    assert [f"of {NAME} was interrupted, cannot be finished and is set aside" in text for text in log.notices] == [True]
    log.move(ledger, NAME, MOVES, replace(DECISION, champion_before=2))
    assert log.finish_left_behind(ledger) == []


def test_a_move_that_can_never_be_finished_does_not_stop_others_and_one_that_may_be_stays(log):
    class Broken(FakeLedger):
        may_pass = True

        def set_alias(self, name, alias, number):
            raise LedgerError("no such run", may_pass=self.may_pass)

    ledger = Broken([version(1), version(2)], champion=1)
    for _ in range(2):
        with pytest.raises(LedgerError):
            log.move(ledger, NAME, MOVES, DECISION)
    assert log.notices == []
    ledger.may_pass = False
    assert log.finish_left_behind(ledger) == []
    assert ["no such run" in text for text in log.notices] == [True]
    assert log.finish_left_behind(FakeLedger([version(1), version(2)], champion=1)) == []


def test_what_was_kept_against_another_champion_is_refused(log):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], champion=3)
    kept = DecisionRecord(version=2, outcome="kept", reasons=("worse",), champion_before=1)
    with pytest.raises(PromotionRefused, match="version 3 by now, not 1"):
        log.move(ledger, NAME, [AliasMove(alias="challenger", version=2)], kept)
    assert ledger.aliases == {"champion": 3}
