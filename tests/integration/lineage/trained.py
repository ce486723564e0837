"""Models that are trained in several segments by the workbench, and recorded as a batch does."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from ringmaster.codec import to_json
from ringmaster.features.reproduction.reproducing import ReproductionOptions, reproduce
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage import Ledger, Origin
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.recording.model_writer import CHAIN, TRAINING, TrainingInputs
from ringmaster.tasks.recording.rows import ROWS, code_version, dataset_inputs, rows_text
from ringmaster.techniques import DataSpec
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.data import prepare
from ringmaster.techniques.processes.gang_events import Steps
from tests.integration.workbench import SINGLE

LINKS = (3, 6, 9)


@dataclass
class RecordedModel:
    """A home with one recorded model, which was trained in three segments."""

    home: Path
    name: str
    run_id: str
    ledger: Ledger
    rows: Path

    def reproduced(self, notice=lambda _: None, **options):
        options = ReproductionOptions(folder=self.home / "again", **options)
        home = LineageHome(folder=self.home, is_fresh=True)
        return reproduce(home, home.find(self.name), options, notice=notice)

    def rewrite(self, path, change):
        """Changes the JSON of an artifact of the model's run."""
        value = change(json.loads(self.ledger.read_text(self.run_id, path)))
        self.ledger.write_json(self.run_id, path, value)


def write_rows(file, *, changed=None, seed=7):
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(["alpha", "beta", "gamma", "delta", "zeta"], k=14)) for _ in range(120)]
    if changed is not None:
        lines[changed] += " omega"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


def job_of(bench, rows, **changes):
    data = DataSpec(name="rows", version="1", path=str(rows), kind="language-modeling", seq_len=16, vocab_size=280)
    return bench.job(data=data, num_steps=LINKS[-1], **changes)


def train(bench, home, job, *, layouts=(SINGLE,) * len(LINKS), between=lambda step, root: None, weights_from=None):
    """Trains a job link by link, one for each layout, and records its model as a batch does."""
    folder, losses = home / "batches" / job.name, {}
    for last_step, layout in zip(LINKS[-len(layouts) :], layouts, strict=True):
        trained = bench.train(
            job,
            layout,
            folder,
            last_step=last_step,
            keep_checkpoints=10,
            weights_from=weights_from and str(weights_from),
        )
        assert trained.outcome.status in ("done", "preempted"), trained.outcome
        for event in trained.events:
            if isinstance(event, Steps):
                losses |= dict(enumerate(event.losses, start=event.first_step + 1))
        between(last_step, folder / "checkpoints")
    return record(bench, home, job, folder, losses)


def record(bench, home, job, folder, losses, *, parents=None):
    ledger = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
    run_id = ledger.start_job(ledger.start_batch("night", batch="night", params={}), job.name, params={})
    ledger.log_metrics(run_id, [MetricPoint("train/loss", loss, step) for step, loss in losses.items()])
    value = TrainingInputs(job=job, parents=parents or {}, folder=str(home), code_version=code_version(home))
    ledger.write_json(run_id, TRAINING, to_json(value))
    ledger.write_text(run_id, CHAIN, read_chain(folder / "checkpoints").to_text())
    data = to_json(prepare(job.data, cache_dir=bench.cache_dir))
    if (manifest := rows_text(data)) is not None:
        ledger.write_text(run_id, ROWS, manifest)
    ledger.record_model(
        job.name,
        run_id=run_id,
        folder=folder / "model",
        kind="fine-tuned" if parents else "pretrained",
        parents=list((parents or {}).values()),
        datasets=dataset_inputs(job.data, data),
        origin=Origin(job=job.name, num_steps=job.num_steps, checkpoints=str(folder / "checkpoints")),
    )
    return RecordedModel(home=home, name=job.name, run_id=run_id, ledger=ledger, rows=Path(job.data.path))
