"""Jobs of kind store in batch files."""

from typing import Any

from ringmaster.features.stores.job import StoreSettings
from ringmaster.tasks.batch.file_hooks import BatchFileHook

STEP_PASSAGES = 1024
"""The passages of a step of a knowledge store."""


class StoresInFiles(BatchFileHook):
    """A store has its kind of data, one pass over it, and large steps."""

    def job_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns a job's values; those of a store completed."""
        if not StoreSettings.is_in(fields):
            return fields
        data = {"held_out": 0.0, **fields["data"]}
        store = {"max_length": data.get("seq_len") or StoreSettings.max_length, **(fields.get("store") or {})}
        chunks = {key: store[key] for key in ("words", "overlap") if store.get(key)}
        data |= {"seq_len": store["max_length"], "kwargs": chunks, "kind": "passages"}
        steps = {"global_batch_size": STEP_PASSAGES} | ({} if fields.get("num_steps") else {"num_epochs": 1.0})
        return {**steps, **fields, "store": store, "data": data}


BATCH_FILE_HOOKS = (StoresInFiles(),)
