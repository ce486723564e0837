"""The key of a batch that limits what the jobs of users may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ringmaster.techniques.job_features import Description, FileKeys, Format, Limits, Whole


@dataclass(frozen=True, kw_only=True)
class UserQuota:
    """What the jobs of a user may hold at a time; both limits hold where both are given."""

    OMITS_DEFAULTS: ClassVar[bool] = True

    max_devices: Annotated[Whole | None, Description("the most devices, such as 4")] = None
    share: Annotated[
        float | None,
        Limits(gt=0, le=1),
        Description("the most devices as a share of all, such as 0.5; a job alone may always run"),
    ] = None

    def within(self, other: "UserQuota") -> "UserQuota":
        """Returns the smaller ones of the limits of both."""
        pairs = ((self.max_devices, other.max_devices), (self.share, other.share))
        most, share = (min((each for each in pair if each is not None), default=None) for pair in pairs)
        return UserQuota(max_devices=None if most is None else int(most), share=share)

    def in_words(self) -> str:
        """Returns the quota as a person writes it."""
        parts = (self.max_devices, None if self.share is None else f"{self.share:.0%}")
        return " and ".join(str(each) for each in parts if each is not None)


@dataclass(frozen=True, kw_only=True)
class UserKeys(FileKeys):
    """Quotas of users."""

    users: Annotated[
        Mapping[Annotated[str, Format("name")], UserQuota],
        Description("quotas of users, such as {ana: {max_devices: 4, share: 0.5}}"),
    ] = field(default_factory=dict)


BATCH_KEYS = (UserKeys,)
