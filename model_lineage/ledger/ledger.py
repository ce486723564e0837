"""The ledger: all MLflow records of a batch, behind one class with plain arguments.

    ledger = Ledger("sqlite:////home/me/.ringmaster/mlflow.db")
    batch = ledger.start_batch("tonight", batch="tonight", params={"objective": "makespan"})
    job = ledger.start_job(batch, "llama", params={"optimizer": {"lr": 3e-4}})
    ledger.log_metrics(job, [MetricPoint("loss", 2.5, step=10)])
    model = ledger.record_model("llama", run_id=job, folder=Path("out"), kind="pretrained")
    ledger.finish_run(job)

The implementation is divided into modules: `connection` (the client, created lazily), `database` (the sqlite file),
`faults` (retries and errors), `runs`, `registry` (finding models), `models` (recording them), `families`
(drawing them), `keeping` (their tensors in the store), `links` and `cards` (the content of their pages).
"""

import json
import time
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from ringmaster.model_lineage.ledger.connection import PROFILES, paged
from ringmaster.model_lineage.ledger.keeping import Keeping
from ringmaster.model_lineage.ledger.runs import TAG_LIMIT, Runs, flat_params
from ringmaster.model_lineage.pages import links
from ringmaster.model_lineage.records import ModelRecord


class Profiles(Runs):
    """The part of the ledger that records profiles."""

    @property
    def profiles_experiment(self) -> str:
        """The experiment of the profiles: the ledger's own experiment with "-profiles" appended."""
        return f"{self.experiment}{PROFILES}"

    def find_profiles(self, fingerprints: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the newest profile of each fingerprint that has one, exactly as recorded."""
        experiment_id = self.experiment_id(self.profiles_experiment, create=False)
        missing, found = set(fingerprints), dict[str, dict[str, Any]]()
        if not missing or experiment_id is None:
            return found
        asked = f"tags.`{_FINGERPRINT}` = '{next(iter(missing))}'" if len(missing) == 1 else ""
        runs = paged(self.client.search_runs, [experiment_id], asked, max_results=_PAGE, order_by=_NEWEST_FIRST)
        for run in islice(runs, _MOST_SEARCHED):  # most options were never measured, and would end no search
            tags = run.data.tags
            if tags.get(_FINGERPRINT) in missing:
                missing.remove(tags[_FINGERPRINT])
                found[tags[_FINGERPRINT]] = json.loads(_joined(tags))
            if not missing:
                break
        return found

    def newest_profiles(self) -> list[dict[str, Any]]:
        """Returns the profiles that were recorded last, of any fingerprint, the newest first."""
        experiment_id = self.experiment_id(self.profiles_experiment, create=False)
        if experiment_id is None:
            return []
        runs = self.client.search_runs([experiment_id], max_results=_NUM_NEWEST, order_by=_NEWEST_FIRST)
        return [json.loads(_joined(run.data.tags)) for run in runs if _FINGERPRINT in run.data.tags]

    def record_profile(
        self, fingerprint: str, profile: Mapping[str, Any], *, tags: Mapping[str, str] | None = None
    ) -> str:
        """Stores `profile` (JSON values) under `fingerprint`, of which the newest is found. Returns the run's id."""
        from mlflow.entities import Metric, Param

        text = json.dumps(dict(profile), sort_keys=True)
        chunks = [text[start : start + TAG_LIMIT] for start in range(0, len(text), TAG_LIMIT)]
        every_tag = {_FINGERPRINT: fingerprint, "ringmaster.type": "profile", **(tags or {})}
        every_tag |= {f"ringmaster.profile.{index}": chunk for index, chunk in enumerate(chunks)}

        now_ms = time.time_ns() // 1_000_000
        flat = flat_params(profile)
        numbers = {k: v for k, v in flat.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        others = {k: v for k, v in flat.items() if k not in numbers}
        client = self.client
        name = str(profile.get("technique", fingerprint))
        experiment_id = self.experiment_id(self.profiles_experiment)
        run_id = str(client.create_run(experiment_id, tags=every_tag, run_name=name).info.run_id)
        client.log_batch(
            run_id,
            metrics=[Metric(key, float(value), now_ms, 0) for key, value in numbers.items()],
            params=[Param(key, str(value)) for key, value in others.items()],
        )
        client.set_terminated(run_id)
        return run_id


def _joined(tags: Mapping[str, str]) -> str:
    chunks: list[str] = []
    while (chunk := tags.get(f"ringmaster.profile.{len(chunks)}")) is not None:
        chunks.append(chunk)
    return "".join(chunks)


_FINGERPRINT = "ringmaster.fingerprint"
_PAGE = 250  # wanted profiles are mostly recent
_MOST_SEARCHED, _NUM_NEWEST = 5000, 100
_NEWEST_FIRST = ["attributes.start_time DESC"]


class Ledger(Profiles, Keeping):
    """A team's record of batches, jobs, profiles and models, in one MLflow store; several threads may use it.

    tracking_uri: "sqlite:////absolute/path/mlflow.db", "postgresql://...", or an MLflow server's "http(s)://...".
    experiment: the ledger's own experiment. The runs and models of a batch go to the experiment EXPERIMENT/BATCH,
        profiles to EXPERIMENT-profiles.
    artifact_root: the folder for files if a database is used directly (beside a sqlite file by default); a server uses
        its own configured location.

    The constructor opens nothing; the first use or `warm_up()` does. Every failure raises LedgerError with a remedy.
    """

    def ui_links(self, *, run_id: str | None = None, model: ModelRecord | None = None) -> dict[str, str]:
        """Returns the paths in MLflow's UI of the experiment and, where given, of a run and a model.

        The experiment is that of the run, or the ledger's own. The paths start with "#/": prefix them with the UI's
        address, or use them unchanged in the UI's markdown.
        """
        experiment_id = str(self.experiment_id(self.experiment)) if run_id is None else self.experiment_of(run_id)
        paths = {"experiment": links.experiment_path(experiment_id)}
        if run_id is not None:
            paths["run"] = links.run_path(experiment_id, run_id)
        if model is not None and model.version is not None:
            paths["model"] = links.model_version_path(model.registered_name, model.version)
        elif model is not None:
            paths["model"] = links.logged_model_path(str(model.experiment_id), model.model_id)
        return paths
