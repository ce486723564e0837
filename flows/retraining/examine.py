"""Evaluation and promotion of models from the command line, on one device of this machine.

A promotion is decided by a policy, or by the person alone, and recorded with the reasons. Promotions in progress are
logged in the pool's database, or in a file of this home.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, SignatureError, input_errors
from ringmaster.files import is_file, path_in
from ringmaster.findings import got
from ringmaster.flows import settings
from ringmaster.flows.batch.run_folder import store_folder
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.output import notice
from ringmaster.flows.pool.own_node import own_devices
from ringmaster.flows.retraining.shrinking import replacement_child
from ringmaster.model_lineage.records import CHAMPION, INDEXED, ModelRecord
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.tasks.alarms import Alarm
from ringmaster.tasks.batch import Batch, document
from ringmaster.tasks.batch.document import place_text
from ringmaster.tasks.batch.references import is_folder
from ringmaster.tasks.batch.schema import Data
from ringmaster.tasks.batch.yaml_sections import findings, read_text
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.datasets.checking import NamedData
from ringmaster.tasks.evaluation.examination import ExaminationRequest, ExaminationResult, examine, examine_each
from ringmaster.tasks.evaluation.model_assertions import importable
from ringmaster.tasks.evaluation.suite import Suite, load_suite
from ringmaster.tasks.evaluation.suite_tests import suite_tests
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.retraining import promotion
from ringmaster.tasks.retraining.policy import OF_POLICY, PromotionDecision, PromotionPolicy, decide_by, load_policy
from ringmaster.tasks.retraining.promotion import MoveLog
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec
from ringmaster.techniques.data import SOURCES
from ringmaster.techniques.data.inference import (
    CLASSIFICATION,
    classes_of,
    encodes_text,
    infer_kind,
    with_processor_of,
)
from ringmaster.techniques.data.row_kind import retriever_of
from ringmaster.techniques.data_source import LANGUAGE_MODELING
from ringmaster.techniques.metric import ModelMetric, metrics_named
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.scoring import Progress, model_spec
from ringmaster.techniques.scoring.scored_rows import read_alike
from ringmaster.text import Notice

SEQ_LEN = 128  # default number of tokens of a row of text


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model that was requested.

    label: its name.
    folder: folder of its files.
    record: its record, if it is registered.
    """

    label: str
    folder: Path
    record: ModelRecord | None = None


def find(name: str, home: LineageHome) -> EvaluatedModel:
    """Returns a folder, or a model of the ledger by NAME, NAME/VERSION, NAME@ALIAS or id; else raises InputError."""
    folder = Path(name)
    if folder.is_dir():
        with input_errors():
            model_spec(folder)
        return EvaluatedModel(label=name, folder=folder)
    if name.startswith((".", "/", "~")):
        raise InputError([f"there is no folder {name}. To fix: name a folder with a model, or a registered model"])
    node = home.find(name.removeprefix("models:/"))
    folder = home.model_dir(node)
    with input_errors(SignatureError):
        home.ledger.check_use(node.record, "evaluate", folder=home.files(node))
    return EvaluatedModel(label=node.label, folder=folder, record=node.record)


def data_spec(text: str, *, all_rows: bool = False) -> DataSpec:
    """Parses the data option: a source, a glob of files, a mapping as in a batch file, or a file with such a mapping.

    all_rows: whether no part of files need be held out, as all rows are scored.

    A mapping may name a data set, which is read from datasets.yaml next to that file, else in the working directory.
    Raises InputError with every fault.
    """
    if text.endswith((".yaml", ".yml")) and is_file(Path(), text):
        file = path_in(Path(), text)
        value, folder = read_text(file, what="a file that can be read"), file.parent
    elif text.lstrip().startswith("{"):
        value, folder = text, Path()
    else:
        value, folder = f"{{{'source' if text in SOURCES else 'path'}: {text!r}}}", Path()
    read = document.read(value)
    if read.findings:
        raise InputError([f"--data: {finding.message}. To fix: {finding.remedy}." for finding in read.findings])
    raw = read.data["data"] if set(read.data) == {"data"} else read.data
    if not isinstance(raw, dict):
        raise InputError([f"--data: must be a mapping, {got(raw)}. To fix: write {{source: digits}}, say"])
    datasets = NamedData(None, folder=folder.resolve())
    raw = datasets.with_files({"data": raw}, origin=lambda place: place)["data"]
    if datasets.findings:
        raise InputError([f"--data: {f.message}. To fix: {f.remedy}." for f in datasets.findings])
    try:
        entry = Data.model_validate(raw, context={"folder": folder.resolve()})
    except ValidationError as error:
        raise InputError(
            [f"--data: {place_text(f.place)}: {f.message}. To fix: {f.remedy}." for f in findings(error, root=Data)]
        ) from error
    spec: DataSpec = from_json(DataSpec, entry.model_dump(exclude_unset=True))  # a kind refuses options of others
    return replace(spec, held_out=0.0) if all_rows and spec.path is not None else spec


def reading_store(data: DataSpec | None, store: str | None, home: LineageHome) -> DataSpec | None:
    """Returns the data with the folder of the knowledge store that its retriever reads.

    store: the version that is read in place of the data's own; None for this one. Raises InputError where there is no
    such store, or nothing in the data that reads it.
    """
    with input_errors():
        retriever = None if data is None else retriever_of(data)
    if data is None or retriever is None:
        if store is not None:
            remedy = "To fix: give --data with a retriever, such as {path: FILES, retriever: {store: NAME@champion}}"
            raise InputError([f"store {store}: there is no data that reads a store. {remedy}"])
        return data
    name = store or retriever.store
    with input_errors():
        is_here = is_folder(name) or Path(name).is_dir()
        folder = name if is_here else str(store_folder(home.ledger, name, settings.home()))
    return data.reading(store=str(Path(folder).resolve()))


def examine_models(
    models: Sequence[EvaluatedModel],
    *,
    data: DataSpec | None,
    tests: Path | None,
    against: EvaluatedModel | None,
    against_data: DataSpec | None = None,
    metrics: Sequence[str] | None = None,
    max_rows: int,
    all_rows: bool = False,
    num_devices: int = 1,
    notice: Notice,
    progress: Progress | None = None,
) -> list[ExaminationResult]:
    """Evaluates models: metrics on held-out data, tests and assertions.

    against_data: the data as `against` reads it; None for `data`.
    metrics: names; None or an empty list means the defaults of each model's kind.
    all_rows: whether all rows of the data are scored, as no model is trained on it; else its held-out part.
    num_devices: of this machine, over which each model is divided.
    Raises InputError on an unknown metric, or if there is nothing to do.
    """
    with input_errors(about="--metric: "), importable(Path.cwd()):
        are_of_models = [isinstance(metric, ModelMetric) for metric in metrics_named(metrics or ())]
    suite = Suite(name="metrics") if tests is None else load_suite(tests)
    has_tests = any(of_kind.entries(suite) for of_kind in suite_tests())
    if data is None and not has_tests and not (are_of_models and all(are_of_models)):
        raise InputError(["there is nothing to evaluate on. To fix: name data by --data, tests by --tests, or both"])
    if twice := sorted(label for label, times in Counter(model.label for model in models).items() if times > 1):
        raise InputError([f"{', '.join(twice)} is named more than once. To fix: name each model once"])
    tests_on_rows = [test for of_kind in suite_tests() for test in of_kind.on_held_out(suite)]
    needs_data: list[Any] = [*suite.slices, *suite.assertions, *tests_on_rows]
    if data is None and needs_data:
        names = ", ".join(entry.name for entry in needs_data)
        raise InputError([f"{names} of {tests} require held-out data. To fix: name it by --data"])
    folder = Path() if tests is None else tests.parent
    with (
        lent_devices(folder, num_devices=num_devices, notice=notice) as (environment, devices),
        importable(Path.cwd()),
    ):
        request = ExaminationRequest(
            job=_job(data, models[0].folder),
            held_out=data is not None,
            suite=suite,
            against=None if against is None else against.folder,
            metrics=metrics or None,
            max_rows=max_rows,
            is_whole=all_rows,
            progress=progress,
            environment=environment,
            device=devices[0],
            more_devices=devices[1:],
            folder=folder,
        )
        result: dict[str, ExaminationResult] = {}
        for group in _reading_alike(data, models):
            job = _job(data, group[0].folder)
            against_job = _job_of_other(data, group[0], against, against_data=against_data)
            own = replace(request, job=job, against_job=against_job)
            result |= examine_each({model.label: model.folder for model in group}, own)
    return [result[model.label] for model in models]


def _reading_alike(data: DataSpec | None, models: Sequence[EvaluatedModel]) -> list[list[EvaluatedModel]]:
    """Returns the models in groups that make the same samples of rows, by one tokenizer or image processor."""
    groups: list[list[EvaluatedModel]] = []
    for model in models:
        alike = (group for group in groups if data is None or _own_job(data, group[0], model) is None)
        if (group := next(alike, None)) is None:
            groups.append([model])
        else:
            group.append(model)
    return groups


def _job_of_other(
    data: DataSpec | None,
    model: EvaluatedModel,
    against: EvaluatedModel | None,
    *,
    against_data: DataSpec | None,
) -> Job | None:
    """Returns the job of the model that others are compared with where it reads the rows otherwise, else None.

    Raises InputError where the values of the two cannot be compared.
    """
    if against is None or (data is None and against_data is None):
        return None
    if against_data is not None:
        return _job(against_data, against.folder)
    own = _own_job(data or DataSpec(), model, against)
    if own is not None and own.data.kind in (None, LANGUAGE_MODELING) and encodes_text(own.data):
        what = f"{model.label} and {against.label} have different tokenizers, and a loss per token of each is of others"
        raise InputError([f"{what}. To fix: evaluate each by itself, or compare them on rows with answers or classes"])
    return own


def _own_job(data: DataSpec, model: EvaluatedModel, other: EvaluatedModel) -> Job | None:
    """Returns the job by which another model reads rows by itself; None where it reads them as the first one does."""
    own, first = _job(data, other.folder), _job(data, model.folder)
    is_named = data.tokenizer is not None or "processor" in {*data.kwargs, *data.options}
    with input_errors():
        is_alike = is_named or own == first or read_alike(first.data, model.folder, other.folder)
    return None if is_alike else own


def examine_by(
    policy: PromotionPolicy,
    models: Iterable[EvaluatedModel],
    *,
    data: DataSpec,
    all_rows: bool = False,
    against: EvaluatedModel | None,
    against_data: DataSpec | None = None,
    num_devices: int = 1,
    notice: Notice,
) -> Generator[list[ExaminationResult]]:
    """Evaluates models for a policy, each once for each of its suites, and compares them with another model.

    all_rows, against_data, num_devices: as in `examine_models`.
    Yields the results of one model after another, lazily.
    """
    with lent_devices(policy.folder, num_devices=num_devices, notice=notice) as (environment, devices):
        for model in models:
            request = ExaminationRequest(
                job=_job(data, model.folder),
                against=None if against is None else against.folder,
                against_job=_job_of_other(data, model, against, against_data=against_data),
                metrics=None if policy.metric is None else [policy.metric],
                more_metrics=[*policy.limits],
                max_rows=policy.max_rows if all_rows else policy.num_rows,
                is_whole=all_rows,
                environment=environment,
                device=devices[0],
                more_devices=devices[1:],
                folder=policy.folder,
            )
            suites = policy.suites or (Suite(name="metrics"),)
            yield [examine(model.folder, replace(request, suite=suite)) for suite in suites]


def _job(data: DataSpec | None, folder: Path) -> Job:
    """Returns a job for an evaluation: the data, if there is any, and how a loss is computed.

    folder: a model's, whose class and classes define how rows are read where `data` does not. Raises InputError where
    the data cannot be read.
    """
    data, model = data or DataSpec(source="digits"), ModelSpec(from_pretrained=str(folder))
    with input_errors():
        kind = data.kind or infer_kind(data, model)
    is_text = data.path is not None or data.source == "python-stdlib"
    if is_text and kind in (None, LANGUAGE_MODELING) and data.seq_len is None:
        data = replace(data, seq_len=SEQ_LEN)
    classes = classes_of(folder) if kind in CLASSIFICATION else ()
    data = replace(data, kind=kind, options={"labels": classes, **data.options} if classes else data.options)
    data = with_processor_of(data, model)
    return Job(name="evaluation", model=ModelSpec(), data=data, num_steps=1, evaluation=EvaluationSpec())


@contextmanager
def lent_devices(
    folder: Path, *, num_devices: int, notice: Notice
) -> Iterator[tuple[GangEnvironment, tuple[Device, ...]]]:
    """Yields a trial environment and leased devices; waits for idle ones, with a notice.

    folder: where a user's functions are imported from, after all other paths.
    Raises InputError where this machine has fewer devices.
    """
    home, wanted = settings.home(), DevicesWanted(least=num_devices, most=num_devices, presses=True)
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        cluster, lend = stack.enter_context(own_devices(home, whose="evaluation", notice=notice))
        if num_devices > (num_here := len(cluster.nodes[0].devices)):
            raise InputError([f"--devices {num_devices}: this machine has {num_here}. To fix: give {num_here} at most"])
        environment = GangEnvironment(
            server=stack.enter_context(ForkServer()),
            devices=cluster.nodes[0].devices,
            cache_dir=home / "cache",
            import_paths=(str(folder.resolve()), str(Path.cwd())),
        )
        yield environment, stack.enter_context(lend(wanted))


@dataclass(frozen=True, kw_only=True)
class PromotionRequest:
    """A person's request.

    model: the model to promote.
    policy: file of the policy; None to promote without one.
    data: the data for the policy's evaluation.
    all_rows: whether all rows of the data are compared on, as no model is trained on them.
    against: name of the model to compare with; None for the champion.
    reader: name of the model that answers by the passages of a store that is to be promoted; None for models.
    force: whether to promote against the policy's decision.
    num_devices: over which each model is divided where it is evaluated.
    why: the person's reason.
    who: the person.
    """

    model: str
    policy: Path | None = None
    data: str | None = None
    all_rows: bool = False
    against: str | None = None
    reader: str | None = None
    force: bool = False
    num_devices: int = 1
    why: str = ""
    who: str


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A decision on a promotion.

    name: registered name of the model.
    version: the version that was considered.
    before: the version that served before, if any.
    decision: the decision.
    """

    name: str
    version: int
    before: int | None
    decision: PromotionDecision

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "model": self.name,
            "version": self.version,
            "promoted": self.decision.promote,
            "champion": self.version if self.decision.promote else self.before,
            "champion_before": self.before,
            "reasons": list(self.decision.reasons),
            "compared": to_json(self.decision.compared),
        }

    def sentence(self) -> str:
        """Returns the decision as a sentence."""
        before = "none before it" if self.before is None else f"version {self.before} before it"
        if self.decision.promote:
            return f"version {self.version} of {self.name} serves; {before}"
        serves = "no version serves" if self.before is None else f"version {self.before} serves"
        return f"version {self.version} of {self.name} is not promoted; {serves}"


def promote_by_hand(
    home: LineageHome,
    request: PromotionRequest,
    *,
    log: MoveLog,
    notice: Notice,
    emit_alarm: Callable[[Alarm], None] = lambda alarm: None,
    train: Callable[[Batch], object] | None = None,
) -> Promotion:
    """Decides on a promotion, and moves the aliases accordingly.

    Where the model breaks a limit of the policy, the cheapest of its smaller children that keeps every rule becomes the
    next version of its name, and is promoted. A version of a knowledge store is judged by what `reader` answers with
    it, compared with what it answers with the store that serves.

    emit_alarm: sends an alarm if a version is refused.
    train: trains a batch of such children where none keeps every rule; None for no training.

    Raises InputError, or PromotionRefused if another promotion was faster.
    """
    _check(request)
    policy = None if request.policy is None else load_policy(request.policy)
    node = _candidate(home, request.model)
    name, version = node.record.registered_name, promotion.version_of(node.record)
    finished = log.finish_left_behind(home.ledger, name)
    serving = home.ledger.get_alias(name, CHAMPION)
    champion = None if serving is None else serving.version
    if champion == version and finished:  # this promotion was begun before, and interrupted
        return _begun_before(home, node)
    if champion == version:
        raise InputError([f"{node.label} serves already. To fix: name another version"])
    if policy is not None and (node.record.kind == INDEXED) != (request.reader is not None):
        remedy = "To fix: give --reader with stores, and with nothing else"
        raise InputError([f"{node.label}: a store, and nothing else, is judged by a model that reads it. {remedy}"])
    if policy is None:
        decision, who = PromotionDecision(promote=True, why=request.why, reasons=(request.why,)), request.who
    else:
        against = request.against or (None if champion is None else f"{name}/{champion}")
        data = data_spec(request.data or "", all_rows=request.all_rows)
        judge = partial(
            judge_versions,
            policy=policy,
            data=data if request.reader else reading_store(data, None, home) or DataSpec(),
            reader=None if request.reader is None else find(request.reader, home),
            all_rows=request.all_rows,
            against=against,
            num_devices=request.num_devices,
            notice=notice,
        )
        with closing(judge(home, [node])) as decisions:
            decision = next(decisions)
        if policy.broken_limits(decision.figures) and request.reader is None:
            more = "--shrink trains some"
            node, decision = replacement_child(
                home, node, policy, decision, judge=judge, notice=notice, train=train, remedy=more
            )
            version = promotion.version_of(node.record)
        decision, who = _with_word_of(request, policy, decision)
    promotion.apply(home.ledger, node.record, decision, log=log, champion=champion, who=who, emit_alarm=emit_alarm)
    return Promotion(name=name, version=version, before=champion, decision=decision)


def _begun_before(home: LineageHome, node: LineageNode) -> Promotion:
    """Returns a promotion that was just finished, with the decision that was made when it was begun."""
    kept = promotion.read_decisions(home.ledger, node.record)
    return Promotion(
        name=node.record.registered_name,
        version=promotion.version_of(node.record),
        before=kept[-1].champion_before,
        decision=PromotionDecision(promote=True, why="; ".join(kept[-1].reasons), reasons=kept[-1].reasons),
    )


def judge_versions(
    home: LineageHome,
    nodes: Iterable[LineageNode],
    policy: PromotionPolicy,
    *,
    data: DataSpec,
    all_rows: bool = False,
    against: str | None,
    reader: EvaluatedModel | None = None,
    num_devices: int = 1,
    notice: Notice,
) -> Generator[PromotionDecision]:
    """Evaluates models for a policy, compared with another one; yields the decisions lazily.

    reader: the model that reads `nodes`, one version of a store, and `against`, another one.
    """
    nodes, against_data = list(nodes), None
    if reader is None:
        other = None if against is None else find(against, home)
        models = [EvaluatedModel(label=node.label, folder=home.model_dir(node), record=node.record) for node in nodes]
    else:
        other = None if against is None else replace(reader, label=against)
        models = [replace(reader, label=node.label, record=node.record) for node in nodes]
        against_data = None if against is None else reading_store(data, against, home)
        data = reading_store(data, nodes[0].label, home) or data
    with closing(
        examine_by(
            policy,
            models,
            data=data,
            all_rows=all_rows,
            against=other,
            against_data=against_data,
            num_devices=num_devices,
            notice=notice,
        )
    ) as examinations:
        for node, result in zip(nodes, examinations, strict=True):
            for examined in result:
                label = None if other is None else other.label
                examined.record(home.ledger, node.record, other=label, notice=notice)
            metric = next((line.metric for examined in result for line in examined.measured), EvaluationSpec.metrics[0])
            yield decide_by(policy, result, metric=metric, is_first=other is None)


def _with_word_of(
    request: PromotionRequest, policy: PromotionPolicy, decision: PromotionDecision
) -> tuple[PromotionDecision, str]:
    """Returns a policy's decision, or that of the person who agrees or forces another, and who made it."""
    if decision.promote and policy.approval_s is not None:
        agrees = f"{request.who} agrees" + (f": {request.why}" if request.why else "")
        return replace(decision, reasons=(*decision.reasons, agrees)), request.who
    if not decision.promote and request.force:
        forced = f"promoted all the same by {request.who}: {request.why}"
        return replace(decision, promote=True, why=forced, reasons=(*decision.reasons, forced)), request.who
    return decision, OF_POLICY + policy.name


def _check(request: PromotionRequest) -> None:
    """Raises InputError if the options of the request contradict each other."""
    has_policy = request.policy is not None
    faults = {
        "the reason is missing. To fix: give it by --why, or name a policy by --policy": not has_policy
        and not request.why,
        "--force, --against, --reader, --data and --all-rows go with a policy. To fix: name one by --policy": (
            not has_policy and (request.force or request.against or request.reader or request.data or request.all_rows)
        ),
        "the policy has nothing to look at. To fix: name data by --data, such as --data digits": has_policy
        and request.data is None,
        "--force requires a reason. To fix: give it by --why": request.force and not request.why,
    }
    if any(faults.values()):
        raise InputError([fault for fault, is_made in faults.items() if is_made])


def _candidate(home: LineageHome, name: str) -> LineageNode:
    """Returns the requested version, the newest one for a name alone. Raises InputError if it is not a version."""
    snapshot, text = home.snapshot, name.removeprefix("models:/")
    newest_first = sorted(snapshot.versions(text), key=lambda node: node.record.version or 0, reverse=True)
    # A model outlives its version: one that was deleted in the registry cannot serve.
    there = (node for node in newest_first if home.ledger.get_version(text, node.record.version or 0) is not None)
    node = next(there, None) or home.find(name)
    if node.record.version is None:
        raise InputError([f"{node.label} is not a registered version. To fix: name a model's version"])
    return node


@contextmanager
def open_move_log() -> Iterator[MoveLog]:
    """Yields the log of alias moves that were begun and not finished; all machines of a pool share it."""
    pool = settings.checked_pool()
    with closing(Database(pool.database if pool else file_url(settings.home() / "promotions.db"))) as database:
        yield MoveLog(database, notice=notice)
