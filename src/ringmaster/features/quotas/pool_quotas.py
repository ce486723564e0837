"""The quotas of users that a person sets for all batches of a pool."""

from collections.abc import Mapping

from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.quotas.terms import Quotas
from ringmaster.tasks.pool.active_batches import change_feature, features_of_pool
from ringmaster.tasks.storage.database import Database


def quota_of(text: str) -> UserQuota | None:
    """Returns a quota that a person writes as 4, 25% or none (None). Raises ValueError on anything else."""
    if text == "none":
        return None
    number, percent, rest = text.partition("%")
    if percent and not rest and number.isdecimal() and 0 < int(number[:4]) <= 100:
        return UserQuota(share=int(number) / 100)
    if not percent and number.isdecimal() and 0 < int(number[:7]) < 10**6:
        return UserQuota(max_devices=int(number))
    raise ValueError(f"{text!r} is not a quota. To fix: a number of devices such as 4, a share such as 25%, or none")


def quotas_of_pool(database: Database) -> Quotas:
    """Returns the quotas that a person has set for all batches of a pool."""
    return next((each for each in features_of_pool(database) if isinstance(each, Quotas)), Quotas())


def set_quotas(database: Database, changes: Mapping[str, UserQuota | None]) -> Quotas:
    """Sets the quotas of users for all batches of a pool, which its controller follows within seconds; returns all.

    changes: by user; None removes one.
    """

    def changed(known: Quotas | None) -> Quotas | None:
        users = {**(known.users if known else {}), **changes}
        left = {user: quota for user, quota in users.items() if quota is not None}
        return Quotas(users=left) if left else None

    change_feature(database, Quotas, changed)
    return quotas_of_pool(database)
