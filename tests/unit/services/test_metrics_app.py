"""The page of the metrics: its form, who may read it, and what its labels hold."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from ringmaster.flows.services.metrics_server import metrics_app
from ringmaster.flows.services.serving import LOOPBACK, checked
from ringmaster.tasks.pool.pool_monitor import (
    BatchStage,
    DeviceStatus,
    LeaderState,
    NodeReading,
    PlanState,
    PoolCounts,
    PoolMeasurement,
    PoolState,
)

USER, PASSWORD = "ringmaster", "correct horse: battery"
STATE = PoolState(
    nodes=(
        NodeReading(
            name="n1",
            status="serving",
            heartbeat=("i", 3),
            devices={**dict.fromkeys(DeviceStatus, 0), DeviceStatus.IDLE: 1, DeviceStatus.LEASED: 3},
        ),
    ),
    leader=LeaderState(is_there=True, epoch=4, heartbeat=(4, 9)),
    batches=dict.fromkeys(BatchStage, 2),
    jobs={("nightly", "running"): 5},
    plan=PlanState(id=8, made_s=1e9, makespan_s=600.0, gap=0.25),
    ends={("nightly", "llama", "earliest"): 1e9 + 60},
)
KNOWN = PoolMeasurement(
    state=STATE,
    counts=PoolCounts(plans={"clock": 2}, segments={"done": 7}, jobs={"failed": 1}, running=frozenset({4, 5, 6})),
    device_seconds={("n1", DeviceStatus.IDLE): 30.0},
    node_heartbeat_age_s={"n1": 2.5},
    leader_heartbeat_age_s=1.5,
)
AWAY = PoolMeasurement(
    state=None, counts=KNOWN.counts, device_seconds={}, node_heartbeat_age_s={}, leader_heartbeat_age_s=None
)


def client(measured=KNOWN, *, user=(USER, PASSWORD)):
    app = metrics_app(lambda: measured, username=USER, password=PASSWORD)
    client = TestClient(checked(app, LOOPBACK), base_url="http://127.0.0.1:9464")
    client.auth = user
    return client


def read(measured=KNOWN):
    """The values on the page, by name and labels."""
    page = client(measured).get("/metrics")
    assert page.status_code == 200
    assert page.headers["Content-Type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(page.text))
    return families, {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_what_is_known_is_on_the_page():
    _, values = read()
    for key, value in {
        ("ringmaster_database_up",): 1,
        ("ringmaster_nodes", "serving"): 1,
        ("ringmaster_devices", "n1", "leased"): 3,
        ("ringmaster_device_seconds_total", "n1", "idle"): 30,
        ("ringmaster_batches", "queued"): 2,
        ("ringmaster_jobs", "nightly", "running"): 5,
        ("ringmaster_job_end_timestamp_seconds", "nightly", "earliest", "llama"): 1e9 + 60,
        ("ringmaster_segments_running",): 3,
        ("ringmaster_plan_makespan_seconds",): 600,
        ("ringmaster_plan_gap_ratio",): 0.25,
        ("ringmaster_plans_total", "clock"): 2,
        ("ringmaster_segments_ended_total", "done"): 7,
        ("ringmaster_segments_ended_total", "crashed"): 0,
        ("ringmaster_jobs_ended_total", "failed"): 1,
        ("ringmaster_leader_elected",): 1,
        ("ringmaster_leader_changes_total",): 4,
        ("ringmaster_leader_heartbeat_age_seconds",): 1.5,
        ("ringmaster_node_heartbeat_age_seconds", "n1"): 2.5,
    }.items():
        assert values[key] == value, key


def test_without_the_database_there_is_no_state_but_what_was_counted():
    _, values = read(AWAY)
    assert values["ringmaster_database_up",] == 0
    assert values["ringmaster_segments_ended_total", "done"] == 7
    states = ("ringmaster_nodes", "ringmaster_jobs", "ringmaster_leader_elected", "ringmaster_segments_running")
    assert not [key for key in values if key[0] in states]


def test_every_metric_has_a_help_text_and_a_name_that_ends_with_its_unit():
    families, _ = read()
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"ringmaster(_[a-z]+)+", family.name), family.name
        if re.search(r"\b[Tt]ime\b", family.documentation.split(",")[0]):
            assert family.name.endswith("_seconds"), family.name
    labels = {name for family in families for sample in family.samples for name in sample.labels}
    assert labels == {"node", "state", "status", "stage", "batch", "job", "end", "reason", "version"}


def test_the_page_of_operations_lists_exactly_these_metrics_with_their_labels():
    families, _ = read()
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \| (gauge|counter) \| ([^|]*)\|", page, re.MULTILINE)
    told = {
        name: set(re.findall("`(.*?)`", labels)) for names, _, labels in rows for name in re.findall("`(.*?)`", names)
    }
    samples = [sample for family in families for sample in family.samples]
    assert told == {sample.name.removeprefix("ringmaster_"): set(sample.labels) for sample in samples}


@pytest.mark.parametrize("user", [None, (USER, "wrong"), ("other", PASSWORD), (USER, "")])
def test_without_the_password_the_page_is_closed(user):
    answer = client(user=user).get("/metrics")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    assert "ringmaster_" not in answer.text


@pytest.mark.parametrize("said", ["Basic", "Basic !!!", "Bearer abc", "Basic cmluZ21hc3Rlcg==", "basic ü"])
def test_other_credentials_are_refused(said):
    answer = client(user=None).get("/metrics", headers={"Authorization": said.encode("utf-8")})
    assert answer.status_code == 401


def test_health_is_open_and_says_nothing():
    answer = client(user=None).get("/health")
    assert (answer.status_code, answer.text) == (200, "OK\n")


def test_a_foreign_host_name_is_refused():
    assert client().get("/metrics", headers={"Host": "evil.example"}).status_code == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "http://[", "null", "", "http://127.0.0.1:9464/evil"])
def test_a_page_of_another_site_is_refused(origin):
    answer = client().get("/metrics", headers={"Origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert client().get("/metrics", headers={"Origin": "http://127.0.0.1:9464"}).status_code == 200


def test_a_header_that_cannot_be_read_gets_the_page_in_its_plain_form():
    page = client().get("/metrics", headers={"Accept": "application/openmetrics-text; version=[;;q=x"})
    assert page.status_code == 200
    assert page.headers["Content-Type"].startswith("text/plain")


def test_it_can_only_be_read():
    assert client().post("/metrics").status_code == 405
