"""The load of this machine before a plan is made, and the first prediction of the ends of a batch and its jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringmaster.flows.batch.context import NodeContext
from ringmaster.flows.reports.progress import current_view
from ringmaster.tasks.execution.events import Prediction
from ringmaster.tasks.execution.forecast import ForecastConditions, errors_in, plan_left, predict
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.profiling.speed_beliefs import MachineLoad, at_load, present_load
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.techniques import Profile

NUM_EARLIER = 20  # runs of the batch whose errors correct a prediction


def load_now(node_context: NodeContext) -> MachineLoad:
    """Returns the load that other work puts on this machine now.

    Devices that other batches hold are busy with these. They will be free when a job of this batch gets them.
    """
    if node_context.leases.held():
        return MachineLoad()
    environment = node_context.environment
    load = present_load(environment.devices, server=node_context.server, cache_dir=environment.cache_dir)
    if load.is_busy:
        current_view.get().notice(f"other work slows this machine down {load.ratio:.1f} times")
    return load


def profiled_at(profiled: Profiled, load: MachineLoad) -> Profiled:
    """Returns the profiles, of jobs and of groups, at a load."""
    return replace(profiled, profiles=at_load(profiled.profiles, load), groups=at_load(profiled.groups, load))


def surroundings_of(node_context: NodeContext, load: MachineLoad) -> ForecastConditions:
    """Returns the load of this machine, and the errors of earlier runs of the batch."""
    earlier = node_context.ledger.finished_batches(node_context.batch.name, most=NUM_EARLIER)
    return ForecastConditions(load=load, earlier=errors_in(earlier))


def prediction_of(
    plan: Plan, problem: Problem, profiles: Mapping[str, Sequence[Profile]], surroundings: ForecastConditions
) -> Prediction:
    """Returns the prediction of a plan's ends.

    profiles: option k of a job in the plan is its profile k.
    """
    return predict(plan_left(problem, plan, profiles), surroundings=surroundings)
