"""Storage of profiles in MLflow, found again by their fingerprints.

Each profile is a small run in an experiment of its own, so that people can sort and compare them in the UI. Its exact
JSON is stored in tags, which one search returns.
"""

import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from ringmaster.model_lineage.ledger.connection import paged
from ringmaster.model_lineage.ledger.runs import TAG_LIMIT, Runs, flat_params

_FINGERPRINT = "ringmaster.fingerprint"
_PAGE = 250  # wanted profiles are mostly recent


class Profiles(Runs):
    """The part of the ledger that records profiles."""

    @property
    def profiles_experiment(self) -> str:
        """The experiment of the profiles: the ledger's own experiment with "-profiles" appended."""
        return f"{self.experiment}-profiles"

    def find_profiles(self, fingerprints: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the newest profile of each fingerprint that has one, exactly as recorded."""
        experiment_id = self.experiment_id(self.profiles_experiment, create=False)
        missing, found = set(fingerprints), dict[str, dict[str, Any]]()
        if not missing or experiment_id is None:
            return found
        newest_first = ["attributes.start_time DESC"]
        for run in paged(self.client.search_runs, [experiment_id], max_results=_PAGE, order_by=newest_first):
            tags = run.data.tags
            if tags.get(_FINGERPRINT) in missing:
                missing.remove(tags[_FINGERPRINT])
                found[tags[_FINGERPRINT]] = json.loads(_joined(tags))
            if not missing:
                break
        return found

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
