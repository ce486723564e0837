"""Commands about single models and the data sets that they read.

Of models: evaluation, monitoring in production, promotion and rollback, export.
"""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.errors import BatchFileError, InputError, PromotionRefused, input_errors, raise_faults
from ringmaster.files import check_new
from ringmaster.flows import output, settings
from ringmaster.flows.commands.running import train_or_resume
from ringmaster.flows.lineage.home import LineageHome, lineage_home

if TYPE_CHECKING:
    from ringmaster.flows.retraining.examine import EvaluatedModel
    from ringmaster.tasks.alarms import Alarm
    from ringmaster.tasks.evaluation.examination import ExaminationResult
    from ringmaster.tasks.retraining.promotion import MoveLog


Devices = Annotated[
    int,
    typer.Option(help="Devices of this machine that divide a model too large for one, by tensor parallelism.", min=1),
]


def promote(
    model: Annotated[
        str, typer.Argument(help="NAME/VERSION, NAME@ALIAS or a model id; NAME alone is its newest version.")
    ],
    policy: Annotated[Path | None, typer.Option(help="Policy file that decides; default: --why does.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data for the policy: a source (digits), files, a mapping or file as a batch's data."),
    ] = None,
    all_rows: output.AllRows = False,
    against: Annotated[
        str | None, typer.Option(help="Model to compare with; default: the champion of the same name.")
    ] = None,
    reader: Annotated[
        str | None, typer.Option(help="Model that reads the store to promote, and by whose answers it is judged.")
    ] = None,
    devices: Devices = 1,
    force: Annotated[bool, typer.Option("--force", help="Promote it though the policy refuses; needs --why.")] = False,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink", help="Train smaller models from one that breaks a limit of the policy, if none is known."
        ),
    ] = False,
    why: Annotated[str, typer.Option(help="Reason, stored with the decision.")] = "",
    as_json: output.AsJson = False,
) -> None:
    """Promote a model: it gets the alias champion. Exit 1: the policy refuses it.

    Of a model that breaks a limit of the policy, the cheapest distilled, pruned or quantized child that keeps all rules
    is promoted in its place.
    """
    from ringmaster.flows.retraining.examine import PromotionRequest, promote_by_hand

    requested = PromotionRequest(
        model=model,
        policy=policy,
        data=data,
        all_rows=all_rows,
        against=against,
        reader=reader,
        force=force,
        num_devices=devices,
        why=why,
        who=getpass.getuser(),
    )
    with _promotions() as (home, log):
        done = promote_by_hand(
            home,
            requested,
            log=log,
            notice=output.error_console().print,
            emit_alarm=emit_pool_alarm,
            train=train_or_resume if shrink else None,
        )
    output.print_result(done.to_json(), (f"- {reason}" for reason in done.decision.reasons), as_json=as_json)
    if not as_json:
        output.error_console().print(done.sentence())
    raise typer.Exit(0 if done.decision.promote else 1)


def rollback(
    name: Annotated[str, typer.Argument(help="Registered model, such as production.digits.")],
    why: Annotated[str, typer.Option(help="Reason, stored with the decision.")] = "",
    as_json: output.AsJson = False,
) -> None:
    """Give the alias champion back to the previous champion of a registered model."""
    from ringmaster.tasks.retraining.promotion import roll_back

    with _promotions() as (home, log):
        restored, taken_back = roll_back(home.ledger, name, log=log, who=getpass.getuser(), why=why)
    sentence = f"version {restored} of {name} serves again; version {taken_back} does not"
    output.print_outcome({"model": name, "champion": restored, "taken_back": taken_back}, [sentence], as_json=as_json)


def emit_pool_alarm(alarm: Alarm) -> None:
    """Notifies the pool's Prefect server, whose automations notify users; does nothing without a pool."""
    if settings.checked_pool() is None:
        return
    settings.prepare_environment(settings.home())  # before Prefect is imported
    from ringmaster.tasks.alarms.prefect_events import emit_alarm

    emit_alarm(alarm)


@contextmanager
def _promotions() -> Iterator[tuple[LineageHome, MoveLog]]:
    """The lineage, and where moves of aliases are written down. Promotions that are refused are the input's fault."""
    from ringmaster.flows.retraining.examine import open_move_log

    with lineage_home(writes=True) as home, open_move_log() as log, input_errors(PromotionRefused):
        yield home, log


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders with models, or NAME, NAME/VERSION, NAME@ALIAS or model ids.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Source (digits), files ('data/*.jsonl'), a mapping or file as a batch file's data."),
    ] = None,
    tests: Annotated[Path | None, typer.Option(help="File of slices, behavioural tests and assertions.")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Knowledge store that the data's retriever reads in place of its own, such as wiki/3."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Model to compare with on the same rows, such as NAME@champion.")
    ] = None,
    against_store: Annotated[
        str | None,
        typer.Option(help="Knowledge store that it reads then, such as wiki/2. Without --against: the model itself."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric; may be repeated. Default: those of the model's kind.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Maximum number of rows.", min=1)] = 2000,
    all_rows: output.AllRows = False,
    devices: Devices = 1,
    record: Annotated[bool, typer.Option(help="Store the results in the run of a registered model.")] = True,
    as_json: output.AsJson = False,
) -> None:
    """Measure models on held-out data with intervals, test their behaviour, compare them. Exit 1: something failed.

    Adapters of one base share one copy of it.
    """
    from ringmaster.flows.retraining import examine

    spec = None if data is None else examine.data_spec(data, all_rows=all_rows)
    if spec is not None and spec.path is not None and spec.held_out > 0 and spec.held_out_path is None:
        output.announce(
            f"scoring the rows that training on {spec.path} holds out, {spec.held_out:.0%}; --all-rows scores all"
        )
    with lineage_home() as home:
        result = [examine.find(model, home) for model in models]
        if record and any(model.record is not None for model in result):
            settings.check_folders(home.folder)  # before anything is scored
        other_spec = None if against_store is None else examine.reading_store(spec, against_store, home)
        spec = examine.reading_store(spec, store, home)
        other = None if against is None else examine.find(against, home)
        if other is None and other_spec is not None:
            if len(models) > 1:
                raise InputError(["--against-store compares one model with itself. To fix: name one, or --against too"])
            other = replace(result[0], label=f"{result[0].label} with {against_store}")
        console = output.error_console()
        with console.status(output.styled("")) as status:
            examined = examine.examine_models(
                result,
                data=spec,
                tests=tests,
                against=other,
                against_data=other_spec,
                metrics=metric,
                max_rows=max_rows,
                all_rows=all_rows,
                num_devices=devices,
                notice=console.print,
                progress=lambda num_done, num_rows: status.update(output.styled(f"{num_done} of {num_rows} rows")),
            )
        for model, seen in zip(result, examined, strict=True):
            if record and model.record is not None:
                label = None if other is None else other.label
                seen.record(home.ledger, model.record, other=label, notice=output.notice)
    by_label = {model.label: seen for model, seen in zip(result, examined, strict=True)}
    if as_json:
        against_label = None if other is None else other.label
        lines = [{"model": label, "against": against_label, **seen.to_json()} for label, seen in by_label.items()]
        output.print_json(lines[0] if len(lines) == 1 else {"models": lines})
    else:
        _show(by_label)
    raise typer.Exit(0 if all(seen.passed for seen in examined) else 1)


def monitor(
    assertions: Annotated[Path, typer.Argument(help="File with assertions.")],
    predictions: Annotated[Path, typer.Argument(help="JSONL or Parquet file with a prediction in each row.")],
    as_json: output.AsJson = False,
) -> None:
    """Check model assertions on predictions that were logged in production. Exit 1: one fails."""
    from ringmaster.codec import to_json
    from ringmaster.tasks.evaluation import model_assertions
    from ringmaster.tasks.evaluation.suite import load_suite

    suite = load_suite(assertions)
    if not suite.assertions:
        raise InputError([f"{assertions} has no assertions. To fix: give some, under `assertions:`"])
    with input_errors(), model_assertions.importable(assertions.parent):
        log = model_assertions.Log(predictions)
        results = model_assertions.check(suite.assertions, log)
    passed = all(result.passed for result in results)
    if as_json:
        output.print_json({"passed": passed, "num_rows": log.num_read, "assertions": to_json(results)})
    else:
        from ringmaster.tasks.evaluation.examination import ExaminationResult

        output.print_rows(
            output.output_console(),
            ExaminationResult(assertions=tuple(results)).tables()["assertions"],
            title="assertions",
        )
    raise typer.Exit(0 if passed else 1)


def _show(examined: Mapping[str, ExaminationResult]) -> None:
    """What was found of each model, for a person: one table of all."""
    from ringmaster.tasks.evaluation.examination import ALL
    from ringmaster.techniques.metric import why_undefined

    result: dict[str, list[Mapping[str, Any]]] = {}
    for label, seen in examined.items():
        which = {"model": label} if len(examined) > 1 else {}
        for title, rows in {"held-out data": _measured(seen), **seen.tables()}.items():
            result.setdefault(title, []).extend({**which, **row} for row in rows)
    for title, lines in result.items():
        if lines:
            output.print_rows(output.output_console(), lines, title=title)
    for label, seen in examined.items():
        for fault in seen.faults:
            text = fault if len(examined) == 1 else f"{label}: {fault}"
            output.error_console().print(text, style="red")
        causes = why_undefined({line.metric: line.value for line in seen.measured if line.slice == ALL})
        output.print_lines(output.error_console(), causes, style="yellow")


def _measured(examined: ExaminationResult) -> list[dict[str, Any]]:
    rows = []
    for line in examined.measured:
        row: dict[str, Any] = {"metric": line.metric, "slice": line.slice, "rows": line.num_rows}
        row |= {"value": line.value, f"{line.level:.0%} interval": f"{line.low:.4g} to {line.high:.4g}"}
        if line.gain is not None and line.p_better is not None and line.p_worse is not None:
            row |= {"other": line.other, "gain": f"{line.gain:+.4g}"}
            row[f"{line.level:.0%} interval of the gain"] = f"{line.gain_low:+.4g} to {line.gain_high:+.4g}"
            p, way = (line.p_better, "better") if line.gain > 0 else (line.p_worse, "worse")
            row["p"] = f"{p:.2g} {way}" if line.gain else ""
        rows.append(row)
    return rows


def export(
    model: Annotated[str, typer.Argument(help="Folder with a model, or NAME, NAME/VERSION, NAME@ALIAS or model id.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; it must not exist yet.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into the weights of its base.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Write a model into one folder that `from_pretrained` reads."""
    from ringmaster.flows.retraining.examine import find

    with lineage_home() as home, input_errors():
        source = find(model, home)
        is_adapter = write_folder(source, folder, merge=merge)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    lines = [f"{source.label} is in {folder}: {num_bytes / 1e6:.1f} MB"]
    if is_adapter:
        lines.append("it is an adapter, which needs its base too; with --merge one folder holds both")
    result = {"model": source.label, "folder": str(folder), "num_bytes": num_bytes, "is_merged": merge}
    output.print_outcome(result, lines, as_json=as_json)


def write_folder(model: EvaluatedModel, folder: Path, *, merge: bool) -> bool:
    """Writes a model into a new folder, an adapter merged into its base if asked; returns whether it is an adapter.

    Raises InputError where the folder exists, or there is nothing to merge, and ValueError where weights are damaged.
    """
    from ringmaster.techniques.models.peft_format import is_adapter

    check_new(folder)
    if merge and not is_adapter(model.folder):
        raise InputError([f"{model.label} is not an adapter, and there is nothing to merge. To fix: leave out --merge"])
    if merge:
        from ringmaster.techniques.models.export import export_merged
        from ringmaster.techniques.scoring import model_spec

        export_merged(model.folder, folder, spec=model_spec(model.folder))
    else:
        from ringmaster.techniques.checkpoints.checkpoint import publish
        from ringmaster.techniques.models.model_folders import tensor_shapes

        tensor_shapes(model.folder)  # that the weights are there, and whole
        with publish(folder) as aside:
            shutil.copytree(model.folder, aside, dirs_exist_ok=True)
    return is_adapter(folder)


datasets_app = typer.Typer(
    no_args_is_help=True, help="Data sets by name and version: what they hold, and what is wrong."
)

File = Annotated[
    Path, typer.Argument(metavar="[FILE]", help="File with `datasets:`: a batch, or a catalogue of its own.")
]
CATALOGUE = Path("datasets.yaml")


@datasets_app.command()
def check(file: File = CATALOGUE, as_json: output.AsJson = False) -> None:
    """Read every data set of a file and list all that is wrong: files, columns, empty parts, changed content.

    Where the file has jobs, also what is wrong with the parts that they read: windows, and rows that are both trained
    and evaluated on. Exit 0 where all is well, 2 where something is not.
    """
    from ringmaster.tasks.batch import load_batch
    from ringmaster.tasks.datasets.checking import read_catalogue, version_faults

    catalogue, raw, faults = read_catalogue(file)
    result = {
        f"{name}/{version}": version_faults(entry, version)
        for name, entry in catalogue.entries.items()
        for version in entry.versions
    }
    faults += [f"{label}: {fault}" for label, reported in result.items() for fault in reported]
    if raw.get("jobs") or raw.get("grid"):
        try:
            load_batch(file)
        except BatchFileError as error:
            faults += [str(fault) for fault in error.faults]
    faults = list(dict.fromkeys(faults))  # what is wrong with the catalogue is wrong with the batch
    output.print_outcome({"datasets": result, "faults": faults}, as_json=as_json)
    raise_faults(faults)
    if not as_json:
        output.output_console().print(f"{len(result)} versions of {len(catalogue.entries)} data sets: nothing is wrong")


@datasets_app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Name of a data set; default: all.")] = None,
    file: Annotated[Path, typer.Option("--file", help="File with `datasets:`.")] = CATALOGUE,
    as_json: output.AsJson = False,
) -> None:
    """List data sets with their versions and splits: files, rows, and the fingerprint of their content."""
    from ringmaster.tasks.batch.references import closest
    from ringmaster.tasks.datasets.checking import read_catalogue, rows_of

    catalogue, _, faults = read_catalogue(file)
    raise_faults(faults)
    if name is not None and name not in catalogue.entries:
        raise InputError([f"there is no data set {name!r}: {closest(name, list(catalogue.entries), what='There are')}"])
    chosen = [entry for entry in catalogue.entries.values() if name in (None, entry.name)]
    rows = [row for entry in chosen for row in rows_of(entry)]
    if as_json:
        output.print_json({"datasets": rows})
        return
    keys = ("name", "version", "split", "num_files", "num_rows")
    cells = [[*(str(row[key]) for key in keys), row["digest"] or "", row["fault"] or row["path"]] for row in rows]
    columns = ("data set", "version", "split", "files", "rows", "digest", "path")
    output.output_console().print(output.plain_table(*columns, rows=cells))


@datasets_app.command()
def trace(
    row: Annotated[str, typer.Argument(help="Text of a row, or FILE:LINE of a file that has it.")],
    text_column: Annotated[str, typer.Option(help="Column that holds the text of a row in a file.")] = "text",
    as_json: output.AsJson = False,
) -> None:
    """List the models that were trained or evaluated on a row of a data set with a name."""
    from ringmaster.flows.lineage.row_readers import TracedRow, readers_of

    traced = TracedRow.of(row)
    with lineage_home() as home:
        result = readers_of(traced, home, text_column=text_column)
    lines = [f"{reader['model']}: {reader['use']} on it, in {reader['data']}" for reader in result]
    nobody = ["no recorded model has read this row from a data set with a name"]
    output.print_result({"models": result}, lines or nobody, as_json=as_json)
