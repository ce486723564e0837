"""The request of a quota, as a flow whose deployment has a form in Prefect's UI."""

from typing import Annotated

from prefect import flow, get_run_logger

from ringmaster.features.quotas.commands import quotas_in_words
from ringmaster.features.quotas.pool_quotas import quota_of, set_quotas
from ringmaster.flows.batch.flow_runs import run_name_template
from ringmaster.flows.form_fields import titled
from ringmaster.flows.pool import batch_requests
from ringmaster.text import printable


@flow(
    name="set-quota", flow_run_name=run_name_template("quota of {user}"), persist_result=True, result_serializer="json"
)
def set_quota(
    user: Annotated[str, titled("User", min_length=1)],
    limit: Annotated[str, titled("Limit", pattern=r"^([1-9][0-9]{0,5}|[1-9][0-9]?%|100%|none)$")],
) -> list[str]:
    """Limits how many devices the jobs of a user may hold at a time, in all batches of the pool.

    Args:
        user: The user that jobs name in batch files.
        limit: A number of devices, such as 4, a share of all devices, such as 25%, or none.
    """
    with batch_requests.open_database(batch_requests.pool_address()) as database:
        set_quotas(database, {user: quota_of(limit)})
        lines = [printable(line) for line in quotas_in_words(database)]
    for line in lines:
        get_run_logger().info(line)
    return lines
