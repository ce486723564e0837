"""Rules of adaptations in batch files: the keys of each kind."""

from collections.abc import Iterator

from ringmaster.findings import Finding, Raw, as_list, as_mapping, findings_where, got
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.references import closest
from ringmaster.techniques.job import (
    ADAPTATIONS,
    DISTILLED,
    INT4_METHODS,
    MERGED,
    PRUNED,
    QUANTIZED,
    STRUCTURED,
    AdaptationSpec,
    is_rewriting,
)
from ringmaster.techniques.job_features import is_black_box

PACKED = 8
"""The weights of 4 bits that files pack in an int32."""
OF_KIND = {
    "teacher": DISTILLED,
    "teacher_model": DISTILLED,
    "temperature": DISTILLED,
    "weight": DISTILLED,
    "sparsity": PRUNED,
    "parents": MERGED,
    "weights": MERGED,
}
"""The keys that only one kind has."""


class AdaptationKeys(BatchFileHook):
    """Checks the keys of each kind of adaptation."""

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields the faults in the adaptation of one job; places are relative to the job."""
        adaptation = as_mapping(job.get("adaptation"))
        kind = str(adaptation.get("kind"))
        if kind not in ADAPTATIONS:
            return
        at = ("adaptation",)
        method, methods = adaptation.get("method"), ADAPTATIONS[kind]
        size = adaptation.get("group_size", AdaptationSpec.group_size)
        sparsity = adaptation.get("sparsity", AdaptationSpec.sparsity)
        yield from findings_where(
            *(
                (
                    owner != kind and adaptation.get(key) not in (None, [], (), getattr(AdaptationSpec, key, None)),
                    (*at, key),
                    f"is for {owner} models, and this one is {kind}",
                    f"remove {key}",
                )
                for key, owner in OF_KIND.items()
            ),
            (method is None and methods, (*at, "method"), "is missing", f"give {' or '.join(methods)}"),
            (
                method is not None and method not in methods,
                (*at, "method"),
                f"{method!r} is no way to get a {kind} model",
                closest(str(method), methods) if methods else "remove method",
            ),
            (
                job.get("adapter") is not None,
                ("adapter",),
                f"does not go with a {kind} model",
                "train the adapter in a job of its own, and adapt its result",
            ),
            (
                is_black_box(job),
                ("model",),
                f"is a command's, which cannot be {kind} from outside",
                "remove the adaptation: the command does it on its own",
            ),
            (
                kind in (PRUNED, QUANTIZED)
                and job.get("base") is None
                and as_mapping(job.get("model")).get("from_pretrained") is None,
                ("base",),
                f"is missing: a {kind} model comes from another",
                "give a job's name, models:/NAME@ALIAS or a folder",
            ),
            (
                method == STRUCTURED and not (job.get("base") and as_mapping(job.get("model")).get("architecture")),
                ("model",),
                "has no shape of its own, or no base with a larger one",
                "give base, and architecture and config of the smaller model",
            ),
            *(
                (
                    is_rewriting(job) and job.get(key),
                    (key,),
                    f"is given, and a {kind} model is not trained",
                    f"remove {key}; to train further, name this job as the base of another",
                )
                for key in ("num_steps", "num_epochs")
            ),
            (
                kind == DISTILLED and adaptation.get("teacher") is None,
                (*at, "teacher"),
                "is missing",
                "give a job's name, models:/NAME@ALIAS or a folder",
            ),
            (
                kind == DISTILLED and job.get("loss") is not None,
                ("loss",),
                "does not go with a teacher, whose logits are weighed against the model's own loss",
                "remove loss, or the adaptation",
            ),
            (
                size != AdaptationSpec.group_size and method not in INT4_METHODS,
                (*at, "group_size"),
                "is for weights in 4 bits",
                f"remove group_size, or take method {' or '.join(INT4_METHODS)}",
            ),
            (
                isinstance(size, int) and size % PACKED,
                (*at, "group_size"),
                f"must be a multiple of {PACKED}, {got(size)}",
                "give 32, 64 or 128",
            ),
            (
                kind == PRUNED and method in ("2:4", STRUCTURED) and sparsity != AdaptationSpec.sparsity,
                (*at, "sparsity"),
                f"of {method} is {'always 0.5' if method == '2:4' else 'not chosen'}, {got(sparsity)}",
                "remove sparsity, or prune by magnitude",
            ),
        )
        if kind == MERGED:
            yield from _merged(job, adaptation)


def _merged(job: Raw, adaptation: Raw) -> Iterator[Finding]:
    parents, weights = as_list(adaptation.get("parents")), as_list(adaptation.get("weights"))
    method, has_base, at = adaptation.get("method"), job.get("base") is not None, ("adaptation",)
    numbers = [weight for weight in weights if isinstance(weight, (int, float))]
    yield from findings_where(
        (
            len(parents) < 2,
            (*at, "parents"),
            "must be two models or more",
            "give jobs, registered models or folders",
        ),
        (
            weights and len(weights) != len(parents),
            (*at, "weights"),
            f"are {len(weights)}, and there are {len(parents)} parents",
            "give one for each of the parents, or none",
        ),
        (
            method == "task-arithmetic" and not has_base,
            ("base",),
            "is missing",
            "give the base that the parents were trained from",
        ),
        (
            method == "average" and has_base,
            ("base",),
            "has no part in an average",
            "name it among the parents, or remove it",
        ),
        (
            method == "average" and numbers and (min(numbers) < 0 or sum(numbers) <= 0),
            (*at, "weights"),
            "of an average must not be negative, nor all 0",
            "give weights above 0",
        ),
    )


BATCH_FILE_HOOKS = (AdaptationKeys(),)
