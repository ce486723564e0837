"""The models of a batch in MLflow: of each job that is done, its model with what it came from and can be made by.

Each method may be called again after it failed half-way: it finds what it has written, or writes it again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringmaster.codec import to_json
from ringmaster.errors import LedgerError, TensorStoreError
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.families import unless_missing
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import ModelRecord, Origin
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.recording.ancestry import Ancestry, kind_of
from ringmaster.tasks.recording.record_hooks import record_hooks
from ringmaster.tasks.recording.rows import ROWS, dataset_inputs, rows_text
from ringmaster.tasks.storage.fact_keys import CHECKPOINT_ROOT, RUN
from ringmaster.tasks.storage.journal import JobRecord, Journal
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.checkpoints.checkpoint import fetch_model
from ringmaster.techniques.metric import metrics_text, why_undefined
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.techniques.processes.gang_events import NUM_ROWS
from ringmaster.text import markdown

PROFILES = "profiles.json"  # among the artifacts of a job's run
TRAINING, CHAIN = "training/job.json", "training/chain.json"
"""The artifacts of a job's run with its `TrainingInputs`, and with the chain of its states (`checkpoints.chain`)."""


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a model was trained by, for making it again.

    parents: the URIs or ids of the models that it came from, by the names that the job uses.
    folder: the folder of its batch file, from which users' functions are imported.
    code_version: as in `Origin`.
    """

    job: Job
    parents: Mapping[str, str]
    folder: str
    code_version: str


@dataclass(frozen=True, kw_only=True)
class JobsToRecord:
    """What is known of a batch's jobs before they run.

    profiles: by job; option k is profile k.
    """

    jobs: Mapping[str, Job]
    preflights: Mapping[str, Preflight]
    profiles: Mapping[str, Sequence[Profile]]

    def job(self, record: JobRecord) -> Job:
        """Returns the current definition of a job, which may have been a placeholder."""
        return record.of(record.settled_job or self.jobs[record.name])

    def like(self, record: JobRecord) -> str:
        """Returns the job whose preflight and profiles hold for a job: usually the job itself."""
        return record.like or record.name

    def preflight(self, record: JobRecord) -> Preflight | None:
        """Returns the preflight of a job; None for one that could not be inspected."""
        return self.preflights.get(self.like(record))


@dataclass(frozen=True, kw_only=True)
class ModelWriter:
    """Records the models of the jobs of a batch that are done. Raises LedgerError if MLflow cannot write.

    known: the jobs of the batch.
    plan: the artifact of the newest plan in the run of the batch, or None.
    code_version: as in `Origin`.
    notice: receives a message if a model cannot be kept in the tensor store.
    """

    ledger: Ledger
    journal: Journal
    batch: Batch
    known: JobsToRecord
    plan: str | None
    code_version: str
    notice: Callable[[str], None]

    @property
    def _ancestry(self) -> Ancestry:
        return Ancestry(ledger=self.ledger, journal=self.journal, jobs=self.known.jobs)

    def forget_ancestors(self) -> None:
        """Forgets the nodes of the models from elsewhere that the jobs came from."""
        for job in self.known.jobs.values():
            self._ancestry.forget(job)

    def write(self, record: JobRecord, run_id: str) -> None:
        """Records the model of a job, and ends the job's run."""
        if (url := self._paths(record).model_url(record.name)) is not None:
            fetch_model(url, record.model_folder)
        ancestry, known_record = self._ancestry, self._record(record.name)
        model = self._model_of_purged_run(known_record, run_id)
        model = model or self._record_model(record, run_id, ancestry=ancestry)
        self.journal.write_job(record.name, model_uri=model.uri)
        self.ledger.set_note(run_id, self._job_note(record, model))
        self.ledger.finish_run(run_id)
        job = self.known.job(self._record(record.name))
        components = {name: prefix for hook in record_hooks() for name, prefix in hook.components(job).items()}
        self._keep(model, record.model_folder, components=components)
        for name, other in self.journal.jobs().items():  # jobs that continue from it, and have ended before
            if not known_record.model_uri and other.model_uri and ancestry.continued_job(name) == record.name:
                if (other_run := self.journal.get(f"run:{name}")) is not None:
                    self._record_model(other, other_run, ancestry=ancestry)
                else:
                    self.notice(f"{other.model_uri} does not show that it is from {model.uri}: its run was purged")
        if ancestry.lost:  # then the event is written again when the batch is resumed
            raise LedgerError("; ".join(ancestry.lost.values()))

    def name_of(self, job: str) -> str:
        """Returns the name of the registered model of a job."""
        return f"{self.batch.name}.{job}"

    def _model_of_purged_run(self, record: JobRecord, run_id: str) -> ModelRecord | None:
        """Returns the model of a job where another run than this one has made it, which is not in MLflow any more."""
        model = None if record.model_uri is None else unless_missing(self.ledger.resolve_model, record.model_uri)
        return None if model is None or model.run_id == run_id else model

    def _record(self, name: str) -> JobRecord:
        return self.journal.job(name) or JobRecord(name=name)

    def _record_model(self, record: JobRecord, run_id: str, *, ancestry: Ancestry) -> ModelRecord:
        known_record = self._record(record.name)
        job, preflight = self.known.job(known_record), self.known.preflights[self.known.like(known_record)]
        parents = ancestry.parents(job)
        data = preflight.data
        if (rows := rows_text(data)) is not None:
            self.ledger.write_text(run_id, ROWS, rows)
        chain = self._write_training(record, job, run_id, parents=ancestry.named_parents(job))
        num_parameters = preflight.facts.num_parameters
        hooks = [*record_hooks()]
        paragraphs = [text for hook in hooks for text in hook.paragraphs(job, record)]
        return self.ledger.record_model(
            self.name_of(job.name),
            run_id=run_id,
            folder=record.model_folder,
            kind=kind_of(job, has_parents=bool(parents or ancestry.lost)),
            parents=[*parents, *ancestry.stores(job)],
            datasets=dataset_inputs(job.data, data),
            params={
                **({"num_parameters": num_parameters} if num_parameters else {}),
                **({"whole_batch": why} if (why := preflight.facts.whole_batch) else {}),
                "num_steps": record.step,
                **({NUM_ROWS: record.num_rows} if record.num_rows is not None else {}),
                **{key: value for hook in hooks for key, value in hook.params(record).items()},
            },
            metrics=record.metrics,
            description="\n\n".join(filter(None, paragraphs)),
            origin=self._origin(record, job, started_from=ancestry.first_weights(job), chain=chain),
        )

    def _write_training(self, record: JobRecord, job: Job, run_id: str, *, parents: Mapping[str, str]) -> str | None:
        """Writes what the model can be made again from: its job, its parents and the chain of its states.

        Returns the path of the chain, or None where there is none.
        """
        folder = str(self.batch.folder)
        inputs = TrainingInputs(job=job, parents=parents, folder=folder, code_version=self.code_version)
        self.ledger.write_json(run_id, TRAINING, to_json(inputs))
        try:
            chain = read_chain(self._paths(record).checkpoint_dir(job))
        except ValueError as error:  # the library of a store's protocol is missing here
            self.notice(f"the states of {job.name} are not recorded: {error}")
            return None
        if chain is not None:
            self.ledger.write_text(run_id, CHAIN, chain.to_text())
        return None if chain is None else CHAIN

    def _origin(self, record: JobRecord, job: Job, *, started_from: str | None, chain: str | None) -> Origin:
        segments = self.journal.segments(job.name)
        spec = segments[-1].spec if segments else None
        return Origin(
            job=job.name,
            batch_run_id=self.journal.get(RUN),
            plan=self.plan,
            profiles=PROFILES if self.known.profiles.get(job.name) else None,
            chain=chain,
            technique=None if spec is None else f"{spec.technique} x{spec.num_devices}",
            checkpoints=self._paths(record).checkpoint_dir(job),
            num_steps=record.step,
            code_version=self.code_version,
            seed=job.seed,
            quantized_base=", ".join(job.base_changes.values()) or None,
            started_from=started_from,
            retraining=self.batch.retraining or None,
        )

    def _paths(self, record: JobRecord) -> RunPaths:
        """Returns the folders of the run, as far as its records need them."""
        root = self.journal.get(CHECKPOINT_ROOT)
        return RunPaths(folder=record.model_folder.parents[1], cache_dir=Path(), checkpoint_root=root)

    def _keep(self, model: ModelRecord, folder: Path, *, components: Mapping[str, str] | None) -> None:
        """Stores a recorded model in the tensor store. A failure is not a fault, as the model is recorded already."""
        if (store := self.ledger.store) is None:
            return
        try:
            self.ledger.keep_tensors(model, folder, store=store, components=components)
        except (ValueError, OSError) as error:
            if isinstance(error, LedgerError) and error.may_pass:
                raise
            is_kept = not isinstance(error, (TensorStoreError, LedgerError, OSError))
            what = "lacks a component" if is_kept else "is not in the tensor store"
            self.notice(f"{model.registered_name} {what}: {error}")

    def _job_note(self, record: JobRecord, model: ModelRecord) -> str:
        where = self.ledger.ui_links(run_id=self.journal.get(RUN), model=model)
        text = metrics_text(record.metrics, num_rows=record.num_rows)
        metrics = markdown(text) or "no metric"
        made = model_pages.link(f"{model.registered_name} version {model.version}", where["model"])
        causes = "".join(f"\n\n{markdown(cause)}" for cause in why_undefined(record.metrics))
        return f"Held-out: {metrics}{causes}\n\nMade {made} in batch {model_pages.link(self.batch.name, where['run'])}."
