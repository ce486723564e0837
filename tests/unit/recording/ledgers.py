"""A ledger in memory, which can be made unavailable."""

import threading

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.records import ModelRecord


class FakeLedger:
    """Stores its records in memory. `away` counts the calls that fail from now on: -1 for all until it is set to 0."""

    tracking_uri = "sqlite:///nowhere.db"
    store = None

    def __init__(self):
        self.away = 0
        self.num_refused = 0
        self.refused = threading.Event()
        self.kept, self.notes, self.tags, self.profiles = [], {}, {}, {}
        self.runs, self.points, self.models, self.tables, self.statuses = {}, [], {}, {}, {}
        self.deleted = set()  # runs

    def _answer(self):
        if self.away:
            self.away -= self.away > 0
            self.num_refused += 1
            self.refused.set()
            raise LedgerError("API request to http://mlflow failed. To fix: start it.", may_pass=True)

    def warm_up(self):
        self._answer()

    def start_batch(self, name, *, batch, params, files, key):
        self._answer()
        run = self.runs.setdefault(key, f"run of {name}")
        self._answer()
        return run

    def start_job(self, batch_run, name, *, params, tags):
        self._answer()
        return self.runs.setdefault((batch_run, name), f"run of {name}")

    def log_metrics(self, run_id, points):
        self._answer()
        known = {(run, point) for run, point in self.points}
        self.points += [(run_id, point) for point in points if (run_id, point) not in known]

    def find_profiles(self, fingerprints):
        self._answer()
        return {name: self.profiles[name] for name in fingerprints if name in self.profiles}

    def record_profile(self, fingerprint, profile):
        self._answer()
        self.profiles[fingerprint] = profile

    def newest_profiles(self):
        return [*self.profiles.values()]

    def write_table(self, run_id, path, rows):
        self._answer()
        self.tables[run_id, path] = list(rows)

    def record_model(self, name, *, run_id, **_):
        self._answer()
        return self.models.setdefault(
            run_id,
            ModelRecord(model_id=f"m-{name}", registered_name=name, version=1, uri=f"models:/{name}/1", run_id=run_id),
        )

    def keep_tensors(self, record, folder, *, store, components=None):
        self._answer()
        self.kept.append((record.registered_name, folder))

    def finish_run(self, run_id, status="FINISHED"):
        self._answer()
        self.statuses[run_id] = status

    def restore_runs(self, batch_run_id):
        if batch_run_id not in self.runs.values():
            raise LedgerError(f"there is no run {batch_run_id}", code="RESOURCE_DOES_NOT_EXIST")
        num_deleted = len(self.deleted)
        self.deleted.clear()
        return num_deleted

    def has_run(self, run_id):
        self._answer()
        return run_id in self.runs.values()

    def version_made_by(self, run_id, name):
        model = self.models.get(run_id)
        return model.uri if model is not None and model.registered_name == name else None

    def resolve_model(self, uri):
        return next(model for model in self.models.values() if model.uri == uri)

    def resume_run(self, run_id):
        self._answer()
        if run_id not in self.runs.values():
            raise LedgerError(f"there is no run {run_id}", code="RESOURCE_DOES_NOT_EXIST")
        if run_id in self.deleted:
            raise LedgerError(f"run {run_id} is deleted", code="INVALID_PARAMETER_VALUE")
        self.statuses[run_id] = "RUNNING"

    def set_note(self, run_id, markdown):
        self._answer()
        self.notes[run_id] = markdown

    def set_tags(self, run_id, tags):
        self._answer()
        self.tags.setdefault(run_id, {}).update(tags)

    def write_json(self, run_id, path, value):
        self._answer()

    def write_svg(self, run_id, path, svg):
        self._answer()

    def ui_links(self, *, run_id=None, model=None):
        return {"model": "#/model", "run": "#/run"}
