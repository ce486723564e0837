"""The key `negatives` of a job's entry, which exists in batch files only: `batch.py` makes jobs and rules of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ringmaster.techniques.job_features import Description, FileKeys, Format, KeysOf, Whole


@dataclass(frozen=True, kw_only=True)
class Negatives(FileKeys):
    """The hard negatives of a dense retriever, mined again after some steps by the retriever as it is then."""

    key = "negatives"
    description = (
        "hard negatives of a contrastive loss that are mined on the way, such as {path: passages.jsonl, "
        "refresh_every: 200}"
    )

    path: Annotated[str, Format("files"), Description('the files of the passages, such as "passages/*.jsonl"')]
    refresh_every: Annotated[Whole, Description("the steps until all passages are encoded again, such as 200")]
    k: Annotated[Whole, Description("the hard negatives of each anchor, such as 4")] = 4
    store: Annotated[
        Annotated[Mapping[str, Any], KeysOf("store")] | None,
        Description("the index of the passages, such as {index: ivf}"),
    ] = None


ENTRY_KEYS = (Negatives,)
INFERRED_KINDS = (("embedding", ("Model",)),)
