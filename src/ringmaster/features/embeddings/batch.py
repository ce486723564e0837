"""Divides a job with `negatives` into parts, between which the passages are encoded anew."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from ringmaster.codec import to_json
from ringmaster.features.embeddings.contrastive import Contrastive, LateInteraction
from ringmaster.features.embeddings.job import Negatives
from ringmaster.findings import Finding, Raw, are_counts, as_mapping, findings_where
from ringmaster.tasks.batch.file_hooks import BatchFileHook, job_of
from ringmaster.tasks.batch.grid import MAX_JOBS
from ringmaster.tasks.batch.references import split_loss
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import FirstCheckpoint, other_features
from ringmaster.techniques.job_specs import RETRIEVER


class NegativesInFiles(BatchFileHook):
    """Retrievers whose negatives are mined on the way."""

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields why hard negatives cannot be mined on the way."""
        mined, num_steps = job.get(Negatives.key), job.get("num_steps")
        if not isinstance(mined, Mapping):
            return
        place, losses = (Negatives.key,), (Contrastive.name, LateInteraction.name)
        retriever = as_mapping(job.get("data")).get("retriever")
        others = ["kind", *(key for key, each in other_features(Negatives).items() if not each.is_divisible)]
        yield from findings_where(
            (
                split_loss(job.get("loss"))[0] not in losses,
                place,
                "are for a contrastive loss",
                f"name {' or '.join(losses)}",
            ),
            (not are_counts(num_steps), place, "are mined after some of the steps", "give num_steps"),
            (
                are_counts(num_steps, mined.get("refresh_every")) and mined["refresh_every"] >= num_steps,
                (*place, "refresh_every"),
                f"is {mined.get('refresh_every')} of {num_steps} steps, so that none would be mined",
                "give fewer steps",
            ),
            (
                are_counts(num_steps, mined.get("refresh_every")) and num_steps / mined["refresh_every"] > MAX_JOBS / 2,
                (*place, "refresh_every"),
                f"is {mined.get('refresh_every')} of {num_steps} steps, which makes more than {MAX_JOBS:,} jobs",
                "give more steps",
            ),
            (retriever is not None, ("data", "retriever"), "cannot be used with negatives", "leave one of the two out"),
            *((job.get(key) is not None, (key,), "does not go with negatives", "leave one out") for key in others),
        )

    def divided(self, job: Job, entry: Section) -> list[Job]:
        """Returns its parts, and the stores between them.

        After each part the passages are encoded by the model so far, and the next part continues from its last
        checkpoint with negatives that are mined in that store (ANCE: Xiong et al., arXiv:2007.00808). The first part
        has those of its batches alone. Each trains its steps of the whole job's schedule.
        """
        mined = getattr(entry, Negatives.key)
        if mined is None:
            return [job]
        parts: list[Job] = []
        schedule = replace(job.schedule, num_steps=job.schedule.num_steps or job.total_steps)
        steps = [*range(0, job.total_steps, mined.refresh_every), job.total_steps]
        settings = {} if mined.store is None else mined.store.model_dump(exclude_unset=True)
        for first, last in pairwise(steps):
            name = job.name if last == job.total_steps else f"{job.name}.to-{last}"
            spec = replace(job.evaluation, at_steps=tuple(step for step in job.evaluation.at_steps if step <= last))
            part = replace(job, name=name, num_steps=last, schedule=schedule, evaluation=spec)
            if parts:
                before, store = parts[-1].name, f"{job.name}.index-{first}"
                passages = {"path": mined.path, "seq_len": job.data.seq_len, "tokenizer": job.data.tokenizer}
                fields = {"name": store, "base": before, "model": to_json(job.model), "data": passages}
                data = replace(job.data, options={**job.data.options, RETRIEVER: {"store": store, "k": mined.k}})
                start = FirstCheckpoint(checkpoints=before, step=first)
                part = replace(part, data=data).with_start(start)
                parts += [job_of({**fields, "store": settings}), part]
            else:
                parts.append(part)
        return parts


BATCH_FILE_HOOKS = (NegativesInFiles(),)
