"""Retraining runs with irregular conditions, in one process: late, repeated, interrupted, deleted models, short limits.

Run as `python -m tests.integration.retraining.run_cases FOLDER`, with RINGMASTER_HOME set. The results of each case are
written to FOLDER/answers.json. Each case has its own models, data and retraining runs.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.integration.retraining.runs import JOB, garbage, rows
from tests.unit.retraining.test_webhook import Receiver

SHORT = JOB.replace("num_steps: 60", "num_steps: 4")
MODEL = """\
  - name: {name}
    job: {{{job}, optimizer: {{lr: 1e-2}}}}
    data: {{path: "{path}", seq_len: 16, vocab_size: 300}}
"""
SWEEP = "    sweep: {optimizer.lr: [1e-9, 3e-2]}\n"


class Died(Exception):
    """Simulates the death of the process."""


class Case:
    """The models of one retraining file, by its name, and its retraining runs.

    caller: the caller of all runs, with the fork server that they use.
    """

    caller: Any = None

    def __init__(
        self, folder: Path, name: str, *, models: tuple[str, ...] = ("a",), limits: str = "{}", more: str = ""
    ):
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        for model in models:
            self.put(f"{model}/2026-11-01.jsonl", 1)
        self.say(models=models, limits=limits, more=more)

    def say(self, *, models: tuple[str, ...] = ("a",), limits: str = "{}", more: str = "") -> None:
        text = "".join(MODEL.format(name=model, job=SHORT, path=f"{model}/*.jsonl") for model in models)
        head = f"name: {self.name}\ndevices: {{cpu: 1}}\nnight: {limits}\nmodels:\n"
        (self.folder / "retraining.yaml").write_text(head + text + more)

    def put(self, name: str, seed: int) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(rows(seed, number=20))

    def run(self, run_date: str | None, *, force: tuple[str, ...] = (), at: str = "") -> dict[str, Any]:
        """Returns the result of one retraining run that starts at a given time, by default on its date."""
        from ringmaster.flows.batch.flow_runs import result_of
        from ringmaster.flows.retrain_daily import retrain_daily

        moment_s = datetime.fromisoformat(at or f"{run_date}T02:00").replace(tzinfo=UTC).timestamp()
        file, caller = str(self.folder / "retraining.yaml"), replace(Case.caller, clock=lambda: moment_s)
        answer = result_of(lambda: retrain_daily(file=file, night=run_date, force=list(force), caller=caller))
        return {**json.loads(json.dumps(answer, allow_nan=False)), "versions": self.versions()}

    def refused(self, run_date: str | None, **asked: Any) -> str:
        from ringmaster.errors import InputError

        try:
            self.run(run_date, **asked)
        except InputError as error:
            return str(error)
        raise AssertionError("it was not refused")

    def dies(self, run_date: str, *, module: str, function: str) -> None:
        """Starts a retraining run whose process dies where it would call a function."""
        with instead(module, function, _die):
            try:
                self.run(run_date)
            except Died:
                return
        raise AssertionError("it did not end")

    def versions(self) -> dict[str, Any]:
        records = [m for m in self.ledger.models() if m.registered_name.startswith(f"{self.name}.")]
        return {f"{m.registered_name}/{m.version}": m.origin.job for m in records}

    def champion(self) -> list[Any]:
        """Returns the champion version of model `a`, and the job that trained it."""
        found = self.ledger.get_alias(f"{self.name}.a", "champion")
        return [found.version, found.origin.job]

    @property
    def ledger(self) -> Any:
        from ringmaster.flows import settings
        from ringmaster.model_lineage import Ledger

        return Ledger(settings.tracking_uri(settings.home()), artifact_root=settings.home() / "mlartifacts")


class instead:
    """Replaces a function of a module for the duration of the context."""

    def __init__(self, module: str, function: str, other: Callable[..., Any]) -> None:
        import importlib

        self.module, self.function, self.other = importlib.import_module(module), function, other

    def __enter__(self) -> Any:
        self.before = getattr(self.module, self.function)
        setattr(self.module, self.function, self.other)
        return self.before

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.function, self.before)


def _die(*_: Any, **__: Any) -> None:
    raise Died


def twice(folder: Path) -> Any:
    """Repeats a retraining run, then forces a model, then runs an earlier date after a later one."""
    case = Case(folder, "twice")
    first = case.run("2026-11-01")
    case.put("a/2026-11-02.jsonl", 2)
    again = case.run("2026-11-01")
    forced = case.run("2026-11-01", force=("a",))
    unknown = case.refused("2026-11-01", force=("b",))
    later = case.run("2026-11-03")
    return {
        "first": first,
        "again": again,
        "forced": forced,
        "unknown": unknown,
        "later": later,
        "overtaken": case.run("2026-11-02"),
        "no date": case.refused("yesterday", at="2026-11-03T02:00"),
        "too late a date": case.refused("2062-11-30", at="2026-11-03T02:00"),
    }


def cut_short(folder: Path) -> Any:
    """Interrupts a run before it compares models, then a run before it saves its trained models."""
    case = Case(folder, "cut")
    case.dies("2026-11-01", module="ringmaster.flows.retrain_daily", function="compare_models")
    case.put("a/2026-11-02.jsonl", 2)  # too late for this run
    on = case.run("2026-11-01")
    case.dies("2026-11-02", module="ringmaster.flows.retraining.train_models", function="_finish_training")
    return {"on": on, "on again": case.run("2026-11-02"), "forced": case.run("2026-11-02", force=("a",))}


def cut_sweep(folder: Path) -> Any:
    """Interrupts a run after its sweep is trained, before the best trial becomes the model's newest version."""
    case = Case(folder, "cutsweep", more=SWEEP)
    case.dies("2026-11-01", module="ringmaster.flows.retraining.train_models", function="_choose_of_sweep")
    return {**case.run("2026-11-01"), "champion": case.champion()}


def half_way(folder: Path) -> Any:
    """Adds data after a run has begun."""
    from ringmaster.flows import retrain_daily as flow

    case = Case(folder, "half")
    choose = flow.select_models

    def late(*given: Any) -> Any:
        case.put("a/2026-11-01.jsonl", 7)
        return choose(*given)

    with instead("ringmaster.flows.retrain_daily", "select_models", late):
        first = case.run("2026-11-01")
    return {"first": first, "next": case.run("2026-11-02")}


def deleted(folder: Path) -> Any:
    """Deletes a registered model, deletes a champion during a run, and renames a model."""
    from ringmaster.flows import retrain_daily as flow

    case = Case(folder, "gone", models=("a", "b"))
    case.run("2026-11-01")
    case.ledger.client.delete_registered_model("gone.a")
    case.put("b/2026-11-02.jsonl", 2)
    train = flow.train_models

    def meanwhile(*given: Any, **said: Any) -> Any:
        case.ledger.client.delete_registered_model("gone.b")
        return train(*given, **said)

    with instead("ringmaster.flows.retrain_daily", "train_models", meanwhile):
        second = case.run("2026-11-02")
    third = case.run("2026-11-03")
    forced = case.run("2026-11-04", force=("a",))
    case.say(models=("a",))
    return {"second": second, "third": third, "forced": forced, "out of the file": case.run("2026-11-05")}


def short(folder: Path) -> Any:
    """Covers runs after their deadline, runs beyond their budget, and reports to a webhook."""
    with Receiver(500, 200) as receiver:
        said = f'{{deadline: "06:00", webhook: "{receiver.url}"}}'
        case = Case(folder, "short", limits=said)
        by_hand = case.run(None, at="2026-11-01T07:00")
        with instead("ringmaster.flows.retraining.retraining_run", "_is_scheduled", lambda: True):
            late = case.run(None, at="2026-11-01T07:00")
        early = case.run(None, at="2026-11-03T05:00")
    case.put("a/2026-11-02.jsonl", 2)
    case.say(limits="{budget: 1.0e-9, webhook: $NOWHERE}")
    poor = case.run("2026-11-04")
    case.say(limits='{deadline: "06:00", budget: 1000, price_per_device_hour: 3}')
    rich = case.run("2026-11-05", at="2026-11-05T02:00")
    found = {"by hand": by_hand, "late": late, "early": early, "poor": poor, "rich": rich}
    return {**found, "got": [got for got, _ in receiver.got]}


def apart(folder: Path) -> Any:
    """Gives one model a shape that its champion does not have, and names files that are not there for another."""
    case = Case(folder, "apart", models=("a", "b"))
    case.run("2026-11-01")
    for model in ("a", "b"):
        case.put(f"{model}/2026-11-02.jsonl", 2)
    lost = MODEL.format(name="lost", job=SHORT, path="lost/*.jsonl")
    case.say(
        more=MODEL.format(name="b", job=SHORT.replace("hidden_size: 32", "hidden_size: 16"), path="b/*.jsonl") + lost
    )
    alarms: list[Any] = []
    with instead("ringmaster.flows.retrain_daily", "emit_alarm", lambda alarm: alarms.append(alarm.message)):
        answer = case.run("2026-11-02")
    case.put("lost/2026-11-01.jsonl", 1)
    case.say(models=("a", "b", "lost"))
    return {**answer, "alarms": alarms, "again": case.run("2026-11-02"), "over": case.run("2026-11-02")}


def alike(folder: Path) -> Any:
    """Trains batches whose jobs have the names of a file's models, also with the point elsewhere."""
    from ringmaster.errors import InputError
    from ringmaster.flows.batch.flow_runs import result_of
    from ringmaster.flows.train_batch import train_batch
    from ringmaster.tasks.batch import Batch
    from ringmaster.tasks.retraining.production import load_production

    case = Case(folder, "alike", models=("a", "a.b"))
    case.run("2026-11-01")
    job = load_production(case.folder / "retraining.yaml").models[0].job

    def train(name: str, job_name: str) -> Any:
        batch = Batch.of(name=name, jobs=[replace(job, name=job_name)], devices={"cpu": 1})
        return result_of(lambda: train_batch(batch, name=name, caller=Case.caller))

    train("alike", "a")
    answer, refused = case.run("2026-11-02"), ""
    try:
        train("alike.a", "b")
    except InputError as error:
        refused = str(error)
    return {**answer, "champion": case.champion(), "refused": refused}


def held(folder: Path) -> Any:
    """Starts a run while another one holds the lock."""
    from ringmaster.flows import settings
    from ringmaster.tasks.retraining.runs import RetrainingRuns
    from ringmaster.tasks.storage.database import Database, file_url

    case = Case(folder, "held")
    database = Database(file_url(settings.home() / "nights.db"))
    with RetrainingRuns(database, clock=lambda: 0.0).held("held", "2026-11-01"):
        refused = case.refused("2026-11-02")
    database.close()
    return {"refused": refused}


def swept(folder: Path) -> Any:
    """Covers a sweep whose best trial is not the model's own job, and a model that only the registry defines."""
    case = Case(folder, "swept", more=SWEEP + "registry: true\n")
    ledger = case.ledger
    tag = MODEL.format(name="tagged", job=SHORT, path="a/*.jsonl")
    text = "\n".join(line[4:] for line in tag.splitlines()[1:])
    for name, value in (("swept.tagged", text), ("swept.wrong", "job: 1"), ("other.tagged", text)):
        ledger.client.create_registered_model(name, tags={"ringmaster.retraining": value})
    answer = case.run("2026-11-01")
    return {**answer, "champion": case.champion(), "rows": answer["batch"]["jobs"]}


def watched(folder: Path) -> Any:
    """Compares stored training statistics with later runs' inputs, and checks assertions on a log of predictions."""
    due = "    due: {new_data: false, drift: {psi: 0.2, min_rows: 20, inputs: {path: lately.jsonl, seq_len: 16, "
    due += "vocab_size: 300}}, assertions: {suite: tests.yaml, predictions: log.jsonl}}\n"
    case = Case(folder, "watched")
    (case.folder / "lately.jsonl").write_text(rows(5))
    (case.folder / "tests.yaml").write_text("name: t\nassertions: [{name: sane, finite: [price]}]\n")
    (case.folder / "log.jsonl").write_text('{"price": 1.5}\n')
    case.say(more=due)
    case.run("2026-11-01")
    case.put("a/2026-11-02.jsonl", 2)
    steady = case.run("2026-11-02")
    (case.folder / "lately.jsonl").write_text('{"text": "nothing like it was before"}\n' * 60)
    (case.folder / "log.jsonl").write_text('{"price": null}\n')
    return {"steady": steady, "drifted": case.run("2026-11-03")}


def shrunk(folder: Path) -> Any:
    """Covers candidates that are slower than their policy allows, and whose quantized children are not."""
    from ringmaster.flows.retraining import compare_models
    from ringmaster.techniques.models.model_folders import quantization_of

    case = Case(folder, "shrunk", more="policy: policy.yaml\nshrink: true\n")
    if find_spec("torchao") is None:
        return {}
    limits = "limits: {latency/p99_s: {at_most: 0.02}}\n"
    (case.folder / "policy.yaml").write_text(f"name: quick\nsignificance: null\n{limits}")
    examine = compare_models.examine_task

    def timed(name: str, model: Path, request: Any) -> Any:
        """Measures a latency that depends on the model alone, and not on the machine."""
        seconds = 0.05 if quantization_of(model) is None else 0.01
        result = examine(name, model, request)
        told = {"value": seconds, "low": seconds, "high": seconds}
        lines = [replace(m, **told) if m.metric.startswith("latency/") else m for m in result.measured]
        return replace(result, measured=tuple(lines))

    with instead("ringmaster.flows.retraining.compare_models", "examine_task", timed):
        first, idle = case.run("2026-11-01"), case.run("2026-11-02")
        case.put("a/2026-11-02.jsonl", 2)
        second = case.run("2026-11-03")
    (base,) = case.ledger.resolve_model("models:/shrunk.a/3").parents
    started = case.ledger.resolve_model(f"models:/{base}")
    case.say(more="shrink: true\n")
    return {
        "first": first,
        "idle": idle,
        "second": second,
        "started": [started.version, started.kind],
        "champion": case.champion(),
        "refused": case.refused("2026-11-04"),
    }


VALUE = """\
    compare_on: {path: "recent/*.jsonl", seq_len: 16, vocab_size: 300}
    due: {value: {worth: 0.5, price: 0.1, windows: [2, 4]}}
"""


def by_value(folder: Path) -> Any:
    """Retrains a model when it pays: not on more rows of one distribution, but once the distribution is another."""
    case = Case(folder, "by_value")
    case.say(more=VALUE)
    results = []
    for day, text in enumerate([rows(1), rows(2), rows(3), garbage(4)], start=1):
        for name, content in ((f"a/2026-11-{day:02d}", text), ("recent/day", text.replace("a dog", "one dog"))):
            case.put(f"{name}.jsonl", 1)
            (case.folder / f"{name}.jsonl").write_text(content)
        results.append(case.run(f"2026-11-{day:02d}"))
    champion = case.ledger.get_alias("by_value.a", "champion")
    drawing = case.ledger.read_text(champion.run_id, "retraining/value.svg")
    return {"runs": results, "champion": case.champion(), "drawing": drawing}


def main(folder: Path) -> None:
    """Runs all cases with one fork server."""
    from ringmaster.flows import settings
    from ringmaster.flows.caller import Caller
    from ringmaster.tasks.retraining import report
    from ringmaster.techniques.processes.forkserver_client import ForkServer

    settings.prepare_environment(settings.home())
    report.WAITS_S = (0.0, 0.0)
    with ForkServer(preload=["transformers:LlamaForCausalLM"]) as server:
        Case.caller = Caller(fork_server=server)
        cases = (
            twice,
            cut_short,
            cut_sweep,
            half_way,
            deleted,
            short,
            apart,
            alike,
            held,
            swept,
            watched,
            shrunk,
            by_value,
        )
        answers = {case.__name__: case(folder) for case in cases}
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
