"""A running pool with a tariff: a batch waits for the cheap hours, and costs what was planned."""

import time
from contextlib import closing
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from ringmaster.features.tariffs.pages import KEY, SpendingReport
from ringmaster.features.tariffs.pool_tariff import load_tariff, set_tariffs
from ringmaster.features.tariffs.tariff_values import measures_of
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobStatus, Journal
from tests.cluster.jobs import profiles_of, torch_job
from tests.cluster.machines import SOURCE
from tests.cluster.waiting import until

DEAR, CHEAP = 3600.0, 36.0  # the price of a device-hour
HOUR_S, SOON_S = 3600.0, 60.0


def set_tariff(database, folder, *, every_s):
    """Sets a tariff by which devices are dear for so many seconds from now on, and then cheap; returns until when."""
    now_s = int(time.time())
    times = [datetime.fromtimestamp(now_s + k * every_s, UTC).isoformat() for k in range(20)]
    rows = [f"{at},{CHEAP if k else DEAR}" for k, at in enumerate(times)]
    (folder / "prices.csv").write_text("\n".join(["time,value", *rows]))
    (folder / "tariff.yaml").write_text("price: prices.csv\n")
    set_tariffs(database, load_tariff(folder / "tariff.yaml"))
    return now_s + every_s


@pytest.fixture
def database(on_sqlite):
    """The database of the pool, whose tariff is removed after the test."""
    home, _ = on_sqlite
    with closing(Database(home.address().database)) as database:
        yield database
        set_tariffs(database, None)


def test_a_batch_waits_for_the_cheap_hours_of_its_pool_and_costs_what_was_planned(on_sqlite, database, tmp_path):
    (home, _), job = on_sqlite, torch_job("patient", num_steps=4, step_s=0.0)
    set_tariff(database, tmp_path, every_s=1800)
    submission = Submission(
        id="patient-1",
        name="patient",
        jobs=(job,),
        profiles={job.name: profiles_of(job)},
        terms=PlanningTerms(objective="cost"),
        folder=str(home.folder / "batches" / "patient-1"),
        cache_dir=str(home.folder / "cache"),
        import_paths=(str(SOURCE),),
        started_s=time.time(),
    )
    Submissions(database).submit(submission)
    of_pool, journal = Journal(database, batch=""), Journal(database, batch=submission.id)
    (first, *_) = until("the batch is planned", lambda: of_pool.plans(since_s=submission.started_s))
    plan = Plan.from_json(first["plan"])
    assert plan.segments[0].start_s > SOON_S and journal.segments() == [], "it waits, though devices are free"
    cheap_s = set_tariff(database, tmp_path, every_s=10)
    until("the job is done", lambda: journal.jobs()[job.name].status == JobStatus.DONE)
    (segment,) = journal.segments()
    assert segment.started_s >= cheap_s
    rate = CHEAP / HOUR_S  # of one device
    planned = measures_of(plan, Problem.from_json(first["problem"]))
    assert planned.cost == pytest.approx(rate * (plan.makespan_s - plan.segments[0].start_s))
    batch = SimpleNamespace(terms=submission.terms, objective="cost")
    results = SpendingReport().batch_results(batch, journal, since_s=submission.started_s)
    assert results["value"] == results[KEY]["measured"]["money"] == pytest.approx(rate * segment.seconds)
