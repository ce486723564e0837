"""The load of this machine before a plan is made, and the prediction of the plan's makespan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringmaster.flows.batch.context import NodeContext
from ringmaster.flows.reports.progress import current_view
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.profiling.prediction import Prediction, errors_of, predict, spread_of_plan
from ringmaster.tasks.profiling.reference import Load, at_load, present_load
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.techniques import Profile

NUM_EARLIER = 20  # runs of the batch whose errors correct a prediction


def load_now(node_context: NodeContext) -> Load:
    """Returns the load that other work puts on this machine now.

    Devices that other batches hold are busy with these. They will be free when a job of this batch gets them.
    """
    if node_context.leases.held():
        return Load()
    environment = node_context.environment
    load = present_load(environment.devices, server=node_context.server, cache_dir=environment.cache_dir)
    if load.is_busy:
        current_view.get().notice(f"other work slows this machine down {load.ratio:.1f} times")
    return load


def profiled_at(profiled: Profiled, load: Load) -> Profiled:
    """Returns the profiles, of jobs and of groups, at a load."""
    return replace(profiled, profiles=at_load(profiled.profiles, load), groups=at_load(profiled.groups, load))


def prediction_of(
    plan: Plan, profiles: Mapping[str, Sequence[Profile]], node_context: NodeContext, *, load: Load
) -> Prediction:
    """Returns the prediction of a plan's makespan, corrected by the errors of earlier runs of the batch.

    profiles: option k of a job in the plan is its profile k.
    """
    earlier = node_context.ledger.finished_batches(node_context.batch.name, most=NUM_EARLIER)
    return predict(
        plan.makespan_s,
        spread=spread_of_plan(plan, profiles, load),
        load=load.ratio,
        earlier=errors_of(earlier),
    )
