"""MLflow runs: one for a batch, one below it for each job, with params, metrics, notes and files."""

import contextlib
import getpass
import hashlib
import json
import math
import posixpath
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from ringmaster.codec import finite
from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger.connection import PROFILES, Connection, batch_experiment, paged
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.text import storable

METRICS_PER_REQUEST = 1000  # MLflow's limits
PARAMS_PER_REQUEST = 100  # and of tags
KEY_LIMIT = 250
PARAM_LIMIT = 6000
TAG_LIMIT = 8000
BATCH_KEY = "ringmaster.batch"
FINAL_STATUSES = ("FINISHED", "FAILED", "KILLED")
_FINGERPRINT = "ringmaster.fingerprint"
PROFILES_PER_PAGE = 250  # wanted profiles are mostly recent
MAX_PROFILES_SEARCHED, NUM_NEWEST_PROFILES = 5000, 100
_NEWEST_FIRST = ["attributes.start_time DESC"]


class LedgerRuns(Connection):
    """The part of the ledger that records runs."""

    def start_batch(
        self,
        name: str,
        *,
        params: Mapping[str, Any],
        batch: str = "",
        files: Mapping[str, str] | None = None,
        key: str = "",
    ) -> str:
        """Starts the run of a batch and returns its id.

        batch: the batch, sweep or retraining file that the run belongs to. All of its runs, and the models that they
            make, go to one experiment. By default they go to the ledger's own.
        files: texts to store with the run, by artifact path.
        key: identifies the batch. If a start with the same key has created a run already, that run is resumed.
        """
        run_id = self.batch_run(key) if key else None
        if run_id is None:
            experiment = batch_experiment(self.experiment, batch) if batch else self.experiment
            tags = {"ringmaster.type": "batch", **({BATCH_KEY: key} if key else {})}
            run_id = self._create_run(name, tags=tags, experiment_id=str(self.experiment_id(experiment)))
        else:
            params = self._resumed(run_id, params)
        self.log_params(run_id, params)
        for path, text in (files or {}).items():
            self.write_text(run_id, path, text)
        return run_id

    def start_job(
        self,
        batch_run_id: str,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Starts the run of job `name` below its batch and returns its id.

        A batch has one run a job: if the run exists already because the start was repeated, it is resumed.
        """
        from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

        experiment_id = self.experiment_of(batch_run_id)
        run_id = self._job_run(batch_run_id, name, experiment_id=experiment_id)
        if run_id is None:
            parent = {MLFLOW_PARENT_RUN_ID: batch_run_id, "ringmaster.type": "job"}
            run_id = self._create_run(name, tags=parent, experiment_id=experiment_id)
        else:
            params = self._resumed(run_id, params)
        self.set_tags(run_id, tags or {})
        self.log_params(run_id, params)
        return run_id

    def resume_run(self, run_id: str) -> None:
        """Sets a run that had ended, or whose process died, to running again."""
        self.client.update_run(run_id, status="RUNNING")

    def restore_runs(self, batch_run_id: str) -> int:
        """Restores the run of a batch and those of its jobs where they were deleted; returns how many were.

        Raises LedgerError if the batch's own run is purged, or its experiment deleted, to which MLflow writes nothing.
        """
        from mlflow.entities import ViewType

        info, condition = self.client.get_run(batch_run_id).info, f"tags.`mlflow.parentRunId` = '{batch_run_id}'"
        self.check_experiment(self.client.get_experiment(info.experiment_id))
        wanted = ([info.experiment_id], condition)
        deleted = paged(self.client.search_runs, *wanted, run_view_type=ViewType.DELETED_ONLY)
        run_ids = [run.info.run_id for run in deleted]
        if info.lifecycle_stage == "deleted":
            run_ids.append(batch_run_id)
        num_restored = 0
        for run_id in run_ids:
            try:
                self.client.restore_run(run_id)
                num_restored += 1
            except LedgerError as error:
                if run_id == batch_run_id or error.code != "RESOURCE_DOES_NOT_EXIST":  # else purged since the search
                    raise
        return num_restored

    def _resumed(self, run_id: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Resumes a run whose start is repeated; returns the params that it lacks, as MLflow changes none."""
        self.resume_run(run_id)
        known = self.client.get_run(run_id).data.params
        return {key: value for key, value in flat_params(params).items() if valid_key(key) not in known}

    def finish_run(self, run_id: str, status: str = "FINISHED") -> None:
        """Ends a run as FINISHED, FAILED or KILLED."""
        if status not in FINAL_STATUSES:
            raise LedgerError(f"a run cannot end as {status!r}: use one of {', '.join(FINAL_STATUSES)}")
        self.client.set_terminated(run_id, status=status)

    def is_finished(self, run_id: str) -> bool:
        """Whether a run has ended successfully, so that its records are complete."""
        return bool(self.client.get_run(run_id).info.status == "FINISHED")

    def experiment_of(self, run_id: str) -> str:
        """Returns the id of a run's experiment."""
        return str(self.client.get_run(run_id).info.experiment_id)

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Logs `params`; a nested mapping {"a": {"b": 1}} becomes "a.b". Logging equal values again is allowed.

        Values that are None are left out.

        A value over MLflow's limit is shortened, and stored in full in the artifact parameters/KEY.json.
        """
        from mlflow.entities import Param

        entries = []
        for key, value in flat_params(params).items():
            text, path = param_text(value), f"parameters/{_file_name(key)}.json"
            if len(text) > PARAM_LIMIT:
                self.write_json(run_id, path, value)
            entries.append(Param(valid_key(key), _shortened(text, PARAM_LIMIT, path)))
        for start in range(0, len(entries), PARAMS_PER_REQUEST):
            self.client.log_batch(run_id, params=entries[start : start + PARAMS_PER_REQUEST])

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Logs `points` in as few requests as MLflow allows. Logging them again with equal timestamps changes nothing.

        A point that is NaN or infinite becomes the tag "ringmaster.non_finite.KEY" with the first such step, because
        MLflow's UI hides a metric whose last value is NaN and draws infinity as 1.8e308.
        """
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [
            Metric(valid_key(p.key), float(p.value), now_ms if p.timestamp_ms is None else p.timestamp_ms, p.step)
            for p in points
            if math.isfinite(p.value)
        ]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self.client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])
        others = {f"ringmaster.non_finite.{p.key}": p for p in reversed(points) if not math.isfinite(p.value)}
        if others:
            known = self.client.get_run(run_id).data.tags
            first = {key: f"{p.value} at step {p.step}" for key, p in others.items() if valid_key(key) not in known}
            self.set_tags(run_id, first)

    def set_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Sets tags on a run. A value over MLflow's limit is shortened, and stored in full in tags/KEY.txt."""
        from mlflow.entities import RunTag

        entries = []
        for key, value in tags.items():
            text, path = param_text(value), f"tags/{_file_name(key)}.txt"
            if len(text) > TAG_LIMIT:
                self.write_text(run_id, path, text)
            entries.append(RunTag(valid_key(key), _shortened(text, TAG_LIMIT, path)))
        for start in range(0, len(entries), PARAMS_PER_REQUEST):
            self.client.log_batch(run_id, tags=entries[start : start + PARAMS_PER_REQUEST])

    def set_note(self, run_id: str, markdown: str) -> None:
        """Sets the description on the run's page, as markdown."""
        self.set_tags(run_id, {"mlflow.note.content": markdown})

    def note(self, run_id: str) -> str:
        """Returns the description on the run's page, or "" if there is none."""
        return str(self.client.get_run(run_id).data.tags.get("mlflow.note.content", ""))

    def write_text(self, run_id: str, path: str, text: str) -> None:
        """Stores `text` as the artifact `path` (relative, "/" between folders), replacing an earlier one."""
        with _file(path) as (local, folder):
            local.write_text(storable(text), encoding="utf-8")
            self.client.log_artifact(run_id, str(local), folder)

    def write_json(self, run_id: str, path: str, value: Any) -> None:
        """Stores `value` as a JSON artifact; NaN and infinity, which JSON lacks, become null."""
        self.write_text(run_id, path, json.dumps(finite(value), indent=2, default=str))

    def write_svg(self, run_id: str, path: str, svg: str) -> None:
        """Stores a drawing as an artifact that the UI shows as a picture."""
        if not path.endswith(".svg"):
            raise LedgerError(f"{path!r} must end in .svg for MLflow to show it as a picture")
        self.write_text(run_id, path, svg)

    def write_table(self, run_id: str, path: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Stores `rows` as an artifact that the UI shows as a table; columns are ordered by first appearance."""
        if not path.endswith(".json"):
            raise LedgerError(f"{path!r} must end in .json for MLflow to show it as a table")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self.write_text(run_id, path, json.dumps(finite({"columns": columns, "data": data}), default=str))
        self._add_logged_artifact(run_id, {"path": path, "type": "table"})

    def read_table(self, run_id: str, path: str) -> list[dict[str, Any]]:
        """Returns the rows of a table that `write_table` has stored. Raises LedgerError if there is none."""
        table = json.loads(self.read_text(run_id, path))
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]

    def read_text(self, run_id: str, path: str) -> str:
        """Returns the text of a run's artifact. Raises LedgerError if there is none."""
        with tempfile.TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, path, folder)).read_text(encoding="utf-8")

    def metric_history(self, run_id: str, key: str) -> dict[int, float]:
        """Returns the values of a run's metric by step, the last one of each step."""
        points = sorted(self.client.get_metric_history(run_id, key), key=lambda point: point.timestamp)
        return {point.step: point.value for point in points}

    def _create_run(self, name: str, *, tags: Mapping[str, str], experiment_id: str) -> str:
        with contextlib.suppress(OSError, KeyError, ImportError):  # a user without a name in the system
            tags = {"mlflow.user": getpass.getuser(), **tags}
        return str(self.client.create_run(experiment_id, tags=dict(tags), run_name=name[:KEY_LIMIT]).info.run_id)

    def batch_run(self, key: str) -> str | None:
        """Returns the existing run of the batch with that key, or None."""
        result = self.client.search_runs(self.experiment_ids(), f"tags.`{BATCH_KEY}` = '{key}'", max_results=1)
        return result[0].info.run_id if result else None

    def finished_batches(self, batch: str, *, most: int) -> list[dict[str, float]]:
        """Returns the metrics of the newest runs of a batch that finished, at most `most` of them, newest first."""
        experiment_id = self.experiment_id(batch_experiment(self.experiment, batch), create=False)
        if experiment_id is None:
            return []
        result = self.client.search_runs(
            [experiment_id],
            "tags.`ringmaster.type` = 'batch' AND attributes.status = 'FINISHED'",
            max_results=most,
            order_by=["attributes.start_time DESC"],
        )
        return [dict(run.data.metrics) for run in result]

    def _job_run(self, batch_run_id: str, name: str, *, experiment_id: str) -> str | None:
        """Returns the existing run of job `name` below the batch, or None."""
        if "'" in name:
            raise LedgerError(f"a job cannot be named {name!r}: use letters, digits, '-', '_' and '.'")
        condition = f"tags.`mlflow.parentRunId` = '{batch_run_id}' AND attributes.run_name = '{name}'"
        result = self.client.search_runs([experiment_id], condition, max_results=1)
        return result[0].info.run_id if result else None

    def _add_logged_artifact(self, run_id: str, entry: Mapping[str, str]) -> None:
        """Adds a table to the tag that lists a run's tables, under a lock so that threads lose no entries."""
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        with self._lock:
            known = json.loads(self.client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
            if dict(entry) not in known:
                self.client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*known, dict(entry)]))

    @property
    def profiles_experiment(self) -> str:
        """The experiment of the profiles: the ledger's own experiment with "-profiles" appended."""
        return f"{self.experiment}{PROFILES}"

    def find_profiles(self, fingerprints: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the newest profile of each fingerprint that has one, exactly as recorded."""
        experiment_id = self.experiment_id(self.profiles_experiment, create=False)
        missing, result = set(fingerprints), dict[str, dict[str, Any]]()
        if not missing or experiment_id is None:
            return result
        requested = f"tags.`{_FINGERPRINT}` = '{next(iter(missing))}'" if len(missing) == 1 else ""
        runs = paged(
            self.client.search_runs, [experiment_id], requested, max_results=PROFILES_PER_PAGE, order_by=_NEWEST_FIRST
        )
        for run in islice(runs, MAX_PROFILES_SEARCHED):  # most options were never measured, and would end no search
            tags = run.data.tags
            if tags.get(_FINGERPRINT) in missing:
                missing.remove(tags[_FINGERPRINT])
                result[tags[_FINGERPRINT]] = _profile_in(tags)
            if not missing:
                break
        return result

    def newest_profiles(self) -> list[dict[str, Any]]:
        """Returns the profiles that were recorded last, of any fingerprint, the newest first."""
        experiment_id = self.experiment_id(self.profiles_experiment, create=False)
        if experiment_id is None:
            return []
        runs = self.client.search_runs([experiment_id], max_results=NUM_NEWEST_PROFILES, order_by=_NEWEST_FIRST)
        return [_profile_in(run.data.tags) for run in runs if _FINGERPRINT in run.data.tags]

    def record_profile(self, fingerprint: str, profile: Mapping[str, Any]) -> str:
        """Stores `profile` (JSON values) under `fingerprint`, of which the newest is found. Returns the run's id."""
        text = json.dumps(dict(profile), sort_keys=True)
        chunks = [text[start : start + TAG_LIMIT] for start in range(0, len(text), TAG_LIMIT)]
        tags = {_FINGERPRINT: fingerprint, "ringmaster.type": "profile"}
        tags |= {f"ringmaster.profile.{index}": chunk for index, chunk in enumerate(chunks)}
        flat = flat_params(profile)
        numbers = {k: float(v) for k, v in flat.items() if _is_number(v)}
        name = str(profile.get("technique", fingerprint))
        run_id = self._create_run(name, tags=tags, experiment_id=str(self.experiment_id(self.profiles_experiment)))
        self.log_params(run_id, {k: v for k, v in flat.items() if k not in numbers})
        self.log_metrics(run_id, [MetricPoint(key, value) for key, value in numbers.items()])
        self.finish_run(run_id)
        return run_id


def _is_number(value: Any) -> bool:
    """Returns whether a value can be a metric: a number, of the range of floats."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (isinstance(value, float) or abs(value) <= sys.float_info.max)


def _profile_in(tags: Mapping[str, str]) -> dict[str, Any]:
    """Returns the profile that the tags of a run hold in pieces."""
    num_pieces = sum(re.fullmatch(r"ringmaster\.profile\.\d+", key) is not None for key in tags)
    profile: dict[str, Any] = json.loads("".join(tags[f"ringmaster.profile.{i}"] for i in range(num_pieces)))
    return profile


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings to dotted keys; empty mappings and values that are None vanish."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def param_text(value: Any) -> str:
    """Returns the text of a parameter or tag: lists and mappings as JSON, other values as Python prints them."""
    return json.dumps(value, default=str) if isinstance(value, (list, tuple, dict)) else storable(str(value))


def valid_key(key: str) -> str:
    """Returns a name of a metric, a parameter or a tag as MLflow accepts it.

    Other characters become "_", and a long name is shortened. A digest keeps different names apart.
    """
    valid = re.sub(r"[^\w.:/ -]", "_", key)[:KEY_LIMIT]
    is_path = posixpath.normpath(key) == key and not key.startswith(("..", "/")) and key != "."
    if valid == key and is_path:
        return key
    mark = hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{valid.replace('/', '_').lstrip('.')[: KEY_LIMIT - 9]}-{mark}"


def _file_name(key: str) -> str:
    return valid_key(key).replace("/", "_")


def _shortened(text: str, limit: int, path: str) -> str:
    ending = f" ... (whole in {path})"
    return text if len(text) <= limit else text[: limit - len(ending)] + ending


@contextlib.contextmanager
def _file(path: str) -> Iterator[tuple[Path, str | None]]:
    """Yields a local file to fill, named like the artifact `path`, and the artifact's folder."""
    pure = PurePosixPath(path)
    if not pure.name or pure.is_absolute() or ".." in pure.parts:
        raise LedgerError(f"{path!r} is not an artifact path: use a relative one without '..'")
    folder = None if pure.parent == PurePosixPath(".") else str(pure.parent)
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / pure.name, folder
