"""The live page: what it sends equals `ringmaster watch --json`, who may read it, and what its files are."""

import asyncio
import inspect
import json
import math
import re
import stat
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ringmaster.errors import InputError
from ringmaster.features.live_page import feed as feeds
from ringmaster.features.live_page.actions import submit
from ringmaster.features.live_page.commands import _password
from ringmaster.features.live_page.curves import MAX_POINTS, Curve
from ringmaster.features.live_page.feed import Feed, RunView, difference
from ringmaster.features.live_page.routes import STATIC, page_routes
from ringmaster.features.live_page.sources import HomeRuns, PoolBatches
from ringmaster.files import sha256_of
from ringmaster.flows import settings
from ringmaster.flows.batch.run_folder import exclusive_lock
from ringmaster.flows.cli import app
from ringmaster.flows.job_forms import job_forms
from ringmaster.flows.pool.batch_requests import ALONE_OVER
from ringmaster.flows.reports.watch import print_timeline
from ringmaster.flows.services.serving import LOOPBACK, PasswordCheck, checked
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.sqlite_files import path_of
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.control.requests import Requests, RequestStatus
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import BATCHES
from ringmaster.techniques.processes.gang_events import EvaluationReported, Steps
from tests.unit.timeline.stories import ZERO_S, Story, halfway, planned

USER, PASSWORD = "ringmaster", "correct horse"
RUN = "story/20260101-000000"


def patched(value, patch):
    """The value after a patch, as `page.js` has it."""
    if patch is None:
        return value
    kind, *of = patch
    if kind == "=":
        return of[0]
    if kind == "{":
        patches, removed = of
        kept = {key: item for key, item in value.items() if key not in removed}
        return kept | {key: patched(value.get(key), each) for key, each in patches.items()}
    start, num_removed, new, patches = of
    items = [*value[:start], *new, *value[start + num_removed :]]
    return [patched(item, patches.get(i) or patches.get(str(i))) for i, item in enumerate(items)]


@pytest.fixture
def home(tmp_path):
    """A home with a run in progress: (home, its story)."""
    folder = tmp_path / "batches" / RUN
    folder.mkdir(parents=True)
    story = Story(folder)
    halfway(story)
    yield tmp_path, story
    story.database.close()


@pytest.fixture
def client(home):
    """Requests to the page of the home, with its password."""
    routes = page_routes(HomeRuns(home[0]), lambda: True)  # a stream ends at once
    app = PasswordCheck(Starlette(routes=routes), username=USER, password=PASSWORD)
    client = TestClient(checked(app, LOOPBACK), base_url="http://127.0.0.1:9465")
    client.auth = (USER, PASSWORD)
    return client


def report(story, job, *, first_step, losses, wall_s):
    """Stores steps of a job's newest segment."""
    number = story.journal.segments(job)[-1].id
    event = Steps(first_step=first_step, seconds=(1.0,) * len(losses), losses=tuple(losses), wall_s=wall_s)
    store = MessageStore(story.database)
    store.store(number, "", events=[(store.newest_event() + 1, event)])


def looking(home, monkeypatch=None):
    """A view of the newest run, whose looks are always due."""
    times = iter(range(0, 10**9, 100))
    return closing(RunView(HomeRuns(home), None, clock=lambda: next(times)))


def test_the_state_is_what_watch_prints(home, capsys):
    folder, story = home
    report(story, "b", first_step=0, losses=[3.0, 2.0], wall_s=ZERO_S + 5)
    with looking(folder) as view:
        kind, data = view.look()
        assert kind == "state" and (data["state"]["run"], data["state"]["is_pool"]) == (RUN, False)
        with HomeRuns(folder).opened(RUN) as target:
            print_timeline(target.read(), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    shown = data["state"]["timeline"]
    assert printed["now_s"] >= shown["now_s"]
    moving = {"now_s", "running", "coming", "jobs", "ends_s"}  # forecasts of what is late move on with the clock
    assert {key: printed[key] for key in printed.keys() - moving} == {key: shown[key] for key in shown.keys() - moving}
    assert [(job["name"], job["step"], job["figures"]) for job in printed["jobs"]] == [
        (job["name"], job["step"], job["figures"]) for job in shown["jobs"]
    ]
    curve = {"step": [1, 2], "value": [3.0, 2.0], "at": [4.0, 5.0], "trained": [1.0, 2.0]}
    assert data["curves"]["train/loss"]["b"] == curve


def test_after_each_change_a_page_has_the_whole_new_state_and_every_curve(home):
    folder, story = home
    with looking(folder) as view:
        state, curves = view.look()[1]["state"], {}
        for step in range(0, 60, 3):
            report(story, "b", first_step=step, losses=[1.0 + step, 2.0, 3.0], wall_s=ZERO_S + 5 + step)
            if step == 30:
                story.journal.write_job("b", status="done", step=33)
            kind, data = view.look()
            assert kind == "change"
            state = patched(state, json.loads(json.dumps(data["patch"])))
            new = data["curves"]["train/loss"]["b"]
            curves = {step: value for step, value in curves.items() if step <= new["after"]}
            curves |= zip(new["step"], new["value"], strict=True)
            assert state == view.state
        assert state["timeline"]["jobs"][1]["status"] == "done"
        whole = view.whole()[1]["curves"]["train/loss"]["b"]
        assert curves == dict(zip(whole["step"], whole["value"], strict=True))
        assert len(curves) == 60


def test_nothing_is_sent_while_nothing_happens_and_a_job_that_goes_back_replaces_its_points(tmp_path):
    run = tmp_path / "batches" / RUN
    run.mkdir(parents=True)
    with closing((story := Story(run)).database), looking(tmp_path) as view:
        story.plan(planned("b", 0, 30, 1))
        story.ran("b", 1, 20, 1)
        story.journal.write_job("b", status="paused")
        report(story, "b", first_step=0, losses=[5.0, 4.0, 3.0], wall_s=ZERO_S + 9)
        assert view.look()[0] == "state"
        assert [view.look() for _ in range(5)] == [None] * 5
        report(story, "b", first_step=1, losses=[2.0], wall_s=ZERO_S + 20)
        change = view.look()[1]["curves"]["train/loss"]["b"]
        assert (change["after"], change["step"], change["value"]) == (1, [2], [2.0])
        whole = view.whole()[1]["curves"]["train/loss"]["b"]
        assert (whole["step"], whole["value"]) == ([1, 2], [5.0, 2.0])


def test_metrics_that_are_not_finite_have_no_point(home):
    folder, story = home
    number, store = story.journal.segments("b")[-1].id, MessageStore(story.database)
    store.store(number, "", events=[(0, EvaluationReported(step=2, metrics={"f1": math.nan, "loss": 1.5}))])
    with looking(folder) as view:
        curve = {"step": [2], "value": [1.5], "at": [1.0], "trained": [0.0]}
        assert view.look()[1]["curves"] == {"eval/loss": {"b": curve}}


def test_a_newer_run_is_shown_once_it_has_a_plan_and_a_home_without_runs_says_so(tmp_path):
    with looking(tmp_path) as view:
        assert view.look() is None and view.whole() == ("fault", feeds.NOTHING_YET)
        for name in ("20260101-000000", "20260102-000000"):
            folder = tmp_path / "batches" / "story" / name
            folder.mkdir(parents=True)
            with closing(Story(folder).database):
                kind, data = view.look()
                assert (kind, data["state"]["run"]) == ("state", f"story/{name}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(2, 5) | st.sampled_from(["", "a", "0"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("abc0"), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, json_values)
def test_a_patch_makes_the_new_value_of_the_old_one(before, after):
    patch = json.loads(json.dumps(difference(before, after)))
    assert json.dumps(patched(before, patch), sort_keys=True) == json.dumps(after, sort_keys=True)


def test_an_item_that_leaves_a_list_is_a_short_patch():
    rows = [{"job": str(i), "note": "x" * 50} for i in range(200)]
    assert len(json.dumps(difference(rows, rows[1:]))) < 60


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=300), st.integers(4, 60))
def test_thinned_curves_keep_the_extremes_and_the_ends(values, most):
    curve = Curve()
    curve.extend(range(len(values)), values, at_s=range(len(values)), trained_s=range(len(values)))
    thin = curve.thinned(most)
    assert len(thin) <= most + 4
    assert (min(thin.values), max(thin.values)) == (min(values), max(values))
    assert (thin.steps[0], thin.steps[-1]) == (0, len(values) - 1)
    assert {*zip(thin.steps, thin.values, strict=True)} <= {*enumerate(values)}


def test_a_long_curve_takes_bounded_memory_and_keeps_one_spike_of_its_first_steps():
    curve = Curve()
    for step in range(20_000):
        curve.extend([step], [99.0 if step == 17 else 1.0], at_s=[step], trained_s=[step])
    assert len(curve) < 2 * MAX_POINTS and max(curve.values) == 99.0


def test_a_page_gets_the_state_then_changes_and_a_comment_while_nothing_happens(home, monkeypatch):
    folder, story = home
    for name in ("LOOK_EVERY_S", "HEARTBEAT_S"):
        monkeypatch.setattr(feeds, name, 0.01)

    async def follow():
        over = False
        feed = Feed(RunView(HomeRuns(folder), None), is_over=lambda: over)
        messages = feed.messages()
        first = await anext(messages)
        while (heartbeat := await anext(messages)) != b":\n\n":
            pass
        await asyncio.to_thread(report, story, "b", first_step=0, losses=[3.0], wall_s=ZERO_S + 5)
        while not (change := await anext(messages)).startswith(b"event: change"):
            pass
        over = True
        return first, heartbeat, change, [message async for message in messages]

    first, _, change, _ = asyncio.run(follow())
    assert first.startswith(b"event: state\ndata: {") and first.endswith(b"}\n\n")
    assert json.loads(change.split(b"data: ")[1])["curves"]["train/loss"]["b"]["value"] == [3.0]


def test_a_view_is_closed_once_nobody_looks_and_opened_for_the_next_page(home, monkeypatch):
    monkeypatch.setattr(feeds, "LOOK_EVERY_S", 0.01)

    async def twice():
        view = RunView(HomeRuns(home[0]), None)
        feed = Feed(view, is_over=lambda: False)
        for _ in range(2):
            messages = feed.messages()
            assert (await anext(messages)).startswith(b"event: state")
            await messages.aclose()
            while view.state is not None:
                await asyncio.sleep(0)

    asyncio.run(twice())


def test_a_page_whose_run_cannot_be_read_says_why_and_goes_on_once_it_can(home):
    folder, story = home
    file = Path(path_of(story.database.url))
    story.database.close()
    aside = file.rename(file.with_suffix(".aside"))
    file.write_bytes(b"no database " * 100)
    with looking(folder) as view:
        kind, text = view.look()
        assert kind == "fault" and text.startswith("the records cannot be read: ")
        assert view.look() is None  # it is told once
        aside.rename(file)
        assert view.look()[0] == "state"


@pytest.mark.parametrize("name", ["run", "sweep", "retrain"])
def test_commands_that_train_have_the_option(name):
    (command,) = [each for each in app.registered_commands if each.callback.__name__ == name]
    assert inspect.signature(command.callback).parameters["page"].default is False


def test_the_password_of_a_home_is_drawn_once_and_its_owners_alone(tmp_path):
    home = tmp_path / "home"
    first = _password(home)
    assert len(first) >= 32 and _password(home) == first
    assert stat.S_IMODE((home / "page-password").stat().st_mode) == 0o600


@pytest.mark.parametrize("path", ["/page/", "/page/page.js", "/page/uplot/uPlot.esm.js", "/page/events", "/"])
def test_nothing_is_read_without_the_password_under_another_host_or_by_another_origin(client, path):
    assert client.get(path).status_code == 200
    assert client.get(path, headers={"Host": "evil.example"}).status_code == 400
    assert client.get(path, headers={"Origin": "http://127.0.0.1:8000"}).status_code == 403
    client.auth = None
    answer = client.get(path)
    assert (answer.status_code, answer.headers["WWW-Authenticate"][:5]) == (401, "Basic")


def test_the_page_may_load_and_run_its_own_files_alone(client):
    for path in ("/page/", "/page/events"):
        policy = client.get(path).headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
        assert "unsafe" not in policy
    html = client.get("/page/").text
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
    own = [file for file in STATIC.rglob("*") if file.is_file() and "uplot" not in file.parts]
    links = [link for file in own for link in re.findall(r"https?://[^\"'`\s>]+", file.read_text())]
    assert set(links) == {"http://www.w3.org/2000/svg"}  # a name of elements, which nobody loads


def test_runs_that_do_not_exist_are_refused(client):
    assert client.get("/page/events", params={"run": "../../etc"}).status_code == 404
    assert client.get("/page/events", params={"run": RUN}).status_code == 200


def answering(story, answer, status=RequestStatus.DONE):
    """A context in which the first request is answered as by what executes the batch; yields what was requested."""

    @contextmanager
    def context():
        seen, requests = [], Requests(story.database)

        def wait(over):
            while not over.wait(0.01):
                for each in requests.open():
                    seen.append((each.kind, dict(each.content)))
                    requests.answer(each.id, status=status, answer=answer)

        folder = Path(path_of(story.database.url)).parent
        with exclusive_lock(folder), background_thread(wait, name="answers"):
            yield seen

    return context()


@pytest.fixture
def own_home(home, monkeypatch):
    """The home of this process."""
    monkeypatch.setenv("RINGMASTER_HOME", str(home[0]))
    return home


def test_each_button_opens_a_form_that_prefect_has_too(client):
    found = client.get("/page/forms", params={"job": ["b"]}).json()
    assert {(each["text"], each["form"]) for each in found} == {
        (text, form.__name__) for form in job_forms() for text in form.links(["b"])
    }
    assert found[0]["schema"]["properties"].keys() >= found[0]["fields"].keys()
    many = client.get("/page/forms", params={"job": ["b", "c"]}).json()
    assert all(each["fields"]["jobs"] == ["b", "c"] for each in many) and {each["text"] for each in many} >= {"pause"}


def test_a_request_goes_to_what_executes_the_run_and_its_answer_comes_back(client, own_home):
    _, story = own_home
    fields = {"action": "pause", "jobs": ["b"]}
    with answering(story, {"message": "paused: b"}) as seen:
        answer = client.post("/page/requests", json={"form": "StateAction", "run": RUN, "batch": "", "fields": fields})
    assert seen == [("pause", {"batch": "", "jobs": ["b"]})]
    assert [each["message"] for each in answer.json()] == ["paused: b"]
    with looking(own_home[0]) as view:
        assert [each["text"] for each in view.look()[1]["state"]["requests"]] == ["paused: b"]


def test_a_clone_is_priced_and_its_settings_are_lines_as_of_the_command(client, own_home):
    _, story = own_home
    fields = {"clone": "b", "settings": "optimizer.lr=1e-4\nnum_steps=9", "mode": "dry-run"}
    with answering(story, {"message": "b-clone1: it ends in 3 s", "price": {"ends_s": 3.0}, "jump": ""}) as seen:
        answer = client.post("/page/requests", json={"form": "CloneAction", "run": RUN, "fields": fields})
    (kind, content), *more = seen
    assert (kind, content["settings"], content["is_dry"], more) == (
        "clone",
        {"optimizer.lr": 1e-4, "num_steps": 9},
        True,
        [],
    )
    assert answer.json()[0]["price"] == {"ends_s": 3.0}


def test_what_cannot_be_done_is_refused_with_its_cause(client, own_home):
    _, story = own_home

    def faults(**content):
        answer = client.post("/page/requests", json={"run": RUN, **content})
        return answer.status_code, answer.json()["faults"]

    pause = {"form": "StateAction", "fields": {"action": "pause", "jobs": ["b"]}}
    assert faults(**pause) == (400, [ALONE_OVER.format("story")])  # nobody executes the run
    assert faults(form="None", fields={}) == (400, ["there is no form 'None' with these fields"])
    code, (fault,) = faults(form="SetAction", fields={"jobs": [], "priority": -1})
    assert code == 400 and fault.startswith("priority: ")
    with answering(story, {"message": "b has ended"}, RequestStatus.REFUSED):
        assert faults(**pause) == (400, ["b has ended"])
    assert client.post("/page/requests", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.post("/page/requests", json=[1]).status_code == 400
    assert client.post("/page/requests", json={"x": "y" * 1_000_001}).status_code == 413
    assert client.post("/page/requests", json={}, headers={"Origin": "http://127.0.0.1:8000"}).status_code == 403
    assert (
        client.post("/page/jobs", json={"batch": "b", "text": ""}).json()["faults"][0].startswith("jobs can be added")
    )
    client.auth = None
    assert client.post("/page/requests", json=pause).status_code == 401


def test_jobs_that_are_added_to_a_pool_are_handed_over_as_by_submit(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    with closing((story := Story(tmp_path)).database):
        url = story.database.url
        pool = PoolAddress(database=url, prefect_api="http://127.0.0.1:4200/api", mlflow_uri="http://127.0.0.1:5000")
        text = (settings.EXAMPLES / "tiny_batch.yaml").read_text()
        with answering(story, {"flow_run": "f1"}, RequestStatus.GRANTED) as seen:
            result = submit(pool, {"batch": "added", "text": text}, folder=tmp_path)
        assert result["page"] == "http://127.0.0.1:4200/runs/flow-run/f1"
        ((kind, content),) = seen
        assert kind == "train" and [job["name"] for job in content["batch"]["jobs"]] == result["jobs"]
        assert content["batch"]["name"] == "added" and Path(content["file"]).is_file()
        with pytest.raises(InputError, match="not a valid name"):
            submit(pool, {"batch": "../x", "text": text}, folder=tmp_path)
        with pytest.raises(InputError, match="jobs: must be a list"):
            submit(pool, {"batch": "added", "text": "jobs: 3"}, folder=tmp_path)


def test_a_pool_shows_its_batches_with_their_pages_and_models(tmp_path):
    with closing((story := Story(tmp_path)).database) as database:
        pool = PoolAddress(
            database=database.url, prefect_api="http://h:4200/api", mlflow_uri="http://user:secret@h:5000"
        )
        story.plan(planned("n1/a", 0, 10, 0))
        story.ran("n1/a", 0, 8, 0)
        journal = Journal(database, batch="n1")
        journal.write_job("a", status="done", step=10, model_uri="models:/n.a/2", model_dir="/m")
        journal.put_all({"flow_run_page": "http://h:4200/runs/flow-run/f", "run": "r1"})
        content = {"name": "nightly", "jobs": [{"name": "a", "num_steps": 10}]}
        row = {"id": "n1", "content": content, "status": "submitted", "message": "", "submitted_s": ZERO_S}
        database.write(lambda connection: connection.execute(insert(BATCHES).values(**row)))
        with closing(RunView(PoolBatches(pool), None)) as view:
            state = view.look()[1]["state"]
        assert (state["is_whole_pool"], [job["name"] for job in state["timeline"]["jobs"]]) == (True, ["n1/a"])
        batch = state["batches"]["n1"]
        pages = {"Prefect": "http://h:4200/runs/flow-run/f", "MLflow": "http://h:5000/#/runs/r1"}
        assert (batch["name"], batch["pages"]) == ("nightly", pages)
        assert batch["models"]["a"]["page"].startswith("http://h:5000/#/models/n.a/versions/2")
        assert "secret" not in json.dumps(state)
        with closing(RunView(PoolBatches(pool), "n1")) as view:
            assert [job["name"] for job in view.look()[1]["state"]["timeline"]["jobs"]] == ["a"]


def test_the_chart_library_is_the_published_one():
    readme = (STATIC / "uplot" / "README.md").read_text()
    digests = dict(re.findall(r"^\| `([\w.]+)` \| `([0-9a-f]{64})` \|", readme, re.MULTILINE))
    files = {file.name for file in (STATIC / "uplot").iterdir()} - {"README.md"}
    assert files == digests.keys() == {"uPlot.esm.js", "uPlot.min.css", "LICENSE"}
    assert {name: sha256_of(STATIC / "uplot" / name) for name in files} == digests
    assert "The MIT License" in Path(STATIC / "uplot" / "LICENSE").read_text()
