"""Runs segments and trials of a command."""

from __future__ import annotations

import selectors
import shutil
import statistics
from pathlib import Path
from typing import Any

from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.external.account import START_PATIENCE_S
from ringmaster.techniques.external.child import CommandProcess, drain, woken_by_signals
from ringmaster.techniques.external.protocol import PROFILE, RUN
from ringmaster.techniques.processes.events import JobReady, OutcomeStatus, TrialMeasured
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import MEASURE, STOP, Reporter
from ringmaster.techniques.training.trainer import WARM_UP_STEPS
from ringmaster.techniques.training.trial_loop import ENOUGH_S, LEAST_STEPS, USUAL_STEPS

WAITING_PATIENCE_S = 3600.0  # for a trial that is done and waits for its neighbours


def run(order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Runs the command from the newest checkpoint to `order.last_step`.

    Returns what `training.segment_loop.train` returns.
    """
    assert order.checkpoint_dir is not None and order.model_dir is not None
    reporter.phase("starting the command", patience_s=START_PATIENCE_S)
    with CommandProcess(order, reporter, mode=RUN, root=Path(order.checkpoint_dir)) as child:
        for _ in child.rounds():
            if reporter.told(STOP):
                child.terminate()
        status, said = child.ended(), child.account
    result = {"status": status, "first_step": said.first_step, "step": said.saved_step, "startup_s": said.startup_s}
    if "checkpoint" in said.seconds:
        result["save_s"] = said.seconds["checkpoint"]
    if status == OutcomeStatus.DONE and said.saved_step != order.last_step:
        raise ValueError(
            f"the command said done at step {said.saved_step}, and its order ends at {order.last_step}. "
            "To fix: say preempted where SIGTERM came, else go on"
        )
    if status == OutcomeStatus.DONE and said.saved_step == order.job.total_steps:
        result["metrics"] = said.metrics()
        result |= {"evaluate_s": said.seconds["metrics"], "export_s": said.seconds.get("model", 0.0)}
        _publish(child.export_to, Path(order.model_dir))
    return result


def profile(order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Measures some steps of the command while its neighbours are busy, then one save, evaluation and export.

    After that, the command no longer loads the machine for neighbours that are still being measured.
    """
    reporter.phase("trying", patience_s=START_PATIENCE_S)
    scratch = Path(order.folder) / "scratch"
    seconds: list[float] = []
    with CommandProcess(order, reporter, mode=PROFILE, root=scratch) as child:
        said, is_ready = child.account, False
        for heard in child.rounds():
            if is_ready and reporter.told(MEASURE):
                seconds += heard
            if not is_ready and len(said.step_seconds) >= WARM_UP_STEPS:
                is_ready = True
                reporter.send(JobReady())
            is_enough = len(seconds) >= LEAST_STEPS and sum(seconds) >= ENOUGH_S
            if reporter.told(STOP) or is_enough or len(seconds) >= USUAL_STEPS:
                child.terminate()
        child.ended()
    if len(seconds) < LEAST_STEPS:
        raise ValueError(
            f"the command ended its trial after {len(said.step_seconds)} steps. "
            "To fix: in mode profile, go on until SIGTERM comes"
        )
    step_s = statistics.median(seconds)
    # The first steps are slower: their time beyond the median counts as start-up.
    first_s = sum(max(taken_s - step_s, 0.0) for taken_s in said.step_seconds[:WARM_UP_STEPS])
    measured = {
        "step_s": step_s,
        "num_measured_steps": len(seconds),
        "startup_s": (said.startup_s or 0.0) + first_s,
        "peak_bytes": child.peak_bytes,
        "save_s": said.seconds.get("checkpoint", 0.0),
        "evaluate_s": said.seconds.get("metrics", 0.0),
        "export_s": said.seconds.get("model", 0.0),
    }
    shutil.rmtree(scratch)
    reporter.phase("waiting for its neighbours", patience_s=WAITING_PATIENCE_S)
    reporter.send(TrialMeasured(profile=measured))
    wait_for_stop(reporter)
    return {"status": OutcomeStatus.DONE}


def wait_for_stop(reporter: Reporter) -> None:
    """Waits until the rank receives the command to stop."""
    with woken_by_signals() as wake, selectors.DefaultSelector() as selector:
        for source in (wake, reporter):
            selector.register(source, selectors.EVENT_READ)
        while not reporter.told(STOP):
            selector.select()
            drain(wake)


def _publish(exported: Path, model_dir: Path) -> None:
    if not any(exported.iterdir()):
        raise ValueError(
            "the command was done with its last step and exported no model. "
            "To fix: write the model into export_to before saying done"
        )
    with publish(model_dir) as aside:
        for path in exported.iterdir():
            shutil.move(path, aside / path.name)
