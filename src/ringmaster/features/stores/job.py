"""`store` of a job: how the passages of a knowledge store are encoded and searched."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ringmaster.extras import missing_extra
from ringmaster.findings import Finding, Location, Raw, as_mapping, findings_where
from ringmaster.techniques.job_features import (
    MAX_AT_ONCE,
    MAX_WHOLE,
    Choices,
    Description,
    Effect,
    FileKeys,
    JobFeature,
    Limits,
    Whole,
    other_features,
)
from ringmaster.techniques.job_specs import RETRIEVER

FLAT, IVF = "flat", "ivf"
INDEXES = (FLAT, IVF)
"""The indexes of a knowledge store."""


@dataclass(frozen=True, kw_only=True)
class StoreKind(FileKeys):
    """What a job makes."""

    kind: Annotated[
        Annotated[str, Choices(("store",))] | None,
        Description("store, for a knowledge store of the data, or leave the key out: a model is trained"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StoreSettings(JobFeature):
    """The index of a job of kind store, and how its passages are encoded.

    Attributes:
        index: "flat", which compares a question with all passages; or "ivf" with those of the nearest of some clusters.
        num_lists: the clusters of an IVF index; None for 4 sqrt(passages).
        least_recall: the share of the 10 nearest passages that an IVF index must find. So many clusters are searched.
        batch_size: the texts of a forward pass of the encoder.
        max_length: the tokens to which a text is cut.
        words: the words of a passage, into which longer texts are divided (100 in DPR: Karpukhin et al.,
            arXiv:2004.04906); None for whole texts.
        overlap: the words that a passage shares with the one before it.
        seed: of the clusters' first centroids, and of the passages whose neighbours are compared.
    """

    key = "store"
    description = "the index of a knowledge store, such as {index: ivf}, or leave the key out"
    effects = Effect.WEIGHTS | Effect.STEP | Effect.TIME | Effect.MODEL
    is_divisible = False
    made_by = "encode"
    product = "a knowledge store"
    model_kind = "indexed"
    group_obstacle = "is adapted in another way too"

    index: Annotated[str, Choices(INDEXES), Description(f"one of {', '.join(INDEXES)}")] = FLAT
    num_lists: Annotated[Whole | None, Description("the clusters of an ivf index, such as 1024")] = None
    least_recall: Annotated[
        float,
        Limits(gt=0, le=1),
        Description("the share of the 10 nearest passages that an ivf index must find, such as 0.95"),
    ] = 0.95
    batch_size: Annotated[Whole, Description("the passages of a forward pass, such as 64")] = 64
    max_length: Annotated[
        int, Limits(ge=2, le=MAX_AT_ONCE), Description("the tokens to which texts are cut, such as 256")
    ] = 256
    words: Annotated[
        Whole | None, Description("the words of a passage, into which longer texts are divided, such as 100")
    ] = None
    overlap: Annotated[
        int, Limits(ge=0, le=MAX_WHOLE), Description("the words shared with the passage before, such as 20")
    ] = 0
    seed: Annotated[int, Limits(ge=0, lt=2**31), Description("the seed of the clusters, such as 0")] = 0

    @classmethod
    def parents_in(cls, job: Raw) -> Iterator[tuple[Location, object]]:
        """Yields where the plain values of a job name the store that its samples read, and its name."""
        yield ("data", RETRIEVER, "store"), as_mapping(as_mapping(job.get("data")).get(RETRIEVER)).get("store")

    @classmethod
    def is_elsewhere(cls, parent: str) -> bool:
        """Returns whether a name may be that of a store: of a version of one that is registered."""
        return True

    @classmethod
    def is_in(cls, job: Raw) -> bool:
        """Returns whether the plain values of a job are those of one that makes a knowledge store."""
        return any(job.get(key) is not None for key in (cls.key, *StoreKind.job_keys()))

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why a job makes no knowledge store."""
        if not cls.is_in(job):
            return
        model, data = as_mapping(job.get("model")), as_mapping(job.get("data"))
        store = as_mapping(job.get("store"))
        length = store.get("max_length")
        problem, _, remedy = (missing_extra("retrieval", feature="a store") or "").partition(". To fix: ")
        trains = ["adapter", "loss", *(key for key, each in other_features(cls).items() if each.is_for_training)]
        yield from findings_where(
            (problem, ("store",), problem, remedy),
            (
                job.get("base") is None and model.get("from_pretrained") is None,
                ("base",),
                "is missing: passages are encoded by a model that has been trained",
                "give a job's name, models:/NAME@ALIAS or a folder; or model.from_pretrained",
            ),
            (
                data.get("path") is None and data.get("name") is None,
                ("data",),
                "has no files of passages",
                "give a path",
            ),
            (
                data.get("kind") not in (None, "passages"),
                ("data", "kind"),
                "is not passages, as in a store",
                "leave it out",
            ),
            (
                None not in (length, data.get("seq_len")) and length != data["seq_len"],
                ("data", "seq_len"),
                f"is {data.get('seq_len')}, and store.max_length, which says the same, is {length}",
                "give one of the two",
            ),
            (
                any(store.get(key) != value for key, value in as_mapping(data.get("kwargs")).items()),
                ("data", "kwargs"),
                "is not read: a store divides passages by its own words and overlap",
                "give these under store",
            ),
            *((job.get(key), (key,), "is for training, and a store trains nothing", f"remove {key}") for key in trains),
        )


JOB_FEATURES = (StoreSettings,)
ENTRY_KEYS = (StoreKind,)
