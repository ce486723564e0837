"""The key `due.value` of files of production models: what retraining costs, and what a worse model does."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ringmaster.findings import Finding, Location, Raw, findings_where
from ringmaster.tasks.retraining.due_keys import MAX_DAYS, DueKeys
from ringmaster.techniques.job_features import Description, Distinct, Limits

MAX_PRICE = 1e100
"""The greatest price, far above any: what a day costs is still finite."""
Price = Annotated[float, Limits(gt=0, le=MAX_PRICE)]
NumDays = Annotated[int, Limits(ge=1, le=MAX_DAYS)]


@dataclass(frozen=True, kw_only=True)
class ValueKeys(DueKeys):
    """What retraining costs, and what a worse model does."""

    key = "value"
    description = "retrains when that pays, rather than on all new data, such as {worth: 40}"

    worth: Annotated[Price, Description("the money that one unit of the metric costs in a day, such as 40")]
    price: Annotated[
        Price | None, Description("the price of one training, such as 12.5; that of the last one where it is left out")
    ] = None
    horizon_days: Annotated[NumDays, Description("days after which a training must have paid, such as 90")] = 90
    windows: Annotated[
        tuple[NumDays, ...],
        Distinct(),
        Description("days of dated files to choose from in place of window_days, such as [7, 14, 28]"),
    ] = ()

    @classmethod
    def findings(cls, model: Raw, *, at: Location) -> Iterator[Finding]:
        """Yields the faults of windows beside what the model says otherwise of its data."""
        if not (model["due"][cls.key] or {}).get("windows"):
            return
        windows = (*at, "due", cls.key, "windows")
        yield from findings_where(
            (
                model["due"]["min_new_samples"],
                (*at, "due", "min_new_samples"),
                "counts how data grows, and in a window it does not",
                "take one of the two, or max_age_days",
            ),
            (
                model["window_days"] is not None,
                windows,
                "are days to choose from, and window_days names them",
                "take one of the two",
            ),
            (
                model["compare_on"] is None,
                windows,
                "need rows of their own to measure the champion on, as other windows hold out other rows",
                "name recent rows by compare_on",
            ),
        )


DUE_KEYS = (ValueKeys,)
