"""What a person may change of a job that runs, or in a job like it: what leaves its speed and size alone."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.batch.batch import job_faults
from ringmaster.tasks.batch.grid import SAME_SHAPE, key_findings, with_values
from ringmaster.tasks.control.requests import MAX_PRIORITY, SETTINGS
from ringmaster.techniques import Job
from ringmaster.techniques.job import DISTILLED, PRUNED, QUANTIZATION_AWARE

CHANGEABLE_FIELDS = ("optimizer", "schedule", "clip_grad_norm", "seed", "global_batch_size")
LARGEST_JUMP = 0.2  # of the logarithm of a step's size, beyond which a user must approve


def step_jump(before: Job, after: Job, *, step: int) -> str:
    """Returns how a change makes the size of the next step jump, which a learning rate scales, in a sentence.

    Empty where it jumps too little to need an approval.

    step: the steps that are done.
    """
    if step == 0 or step >= min(before.total_steps, after.total_steps):
        return ""
    rates = before.learning_rate(step), after.learning_rate(step)
    if rates[0] == rates[1] or (min(rates) > 0 and abs(math.log(rates[1] / rates[0])) <= LARGEST_JUMP):
        return ""
    factor = f", by a factor of {rates[1] / rates[0]:.3g}" if rates[0] else ""
    return f"after step {step} the learning rate jumps from {rates[0]:.3g} to {rates[1]:.3g}{factor}"


def with_steps(job: Job, num_steps: int) -> Job:
    """Returns a job with another number of steps."""
    features = tuple(feature.with_steps(num_steps) for feature in job.features)
    return replace(job, num_steps=num_steps, num_epochs=None, features=features)


def change_faults(job: Job, settings: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with other values of a job of its speed and size, with remedies, by the rules of files."""
    trained = (DISTILLED, PRUNED, QUANTIZATION_AWARE)
    if job.made_by or (job.adaptation is not None and job.adaptation.kind not in trained):
        return [f"{job.name} does not train on its own, so none of its values can differ. To fix: submit another job"]
    unknown = [key for key in settings if not any(key == each or key.startswith(f"{each}.") for each in SAME_SHAPE)]
    remedy = f"To fix: choose from {', '.join(SAME_SHAPE)}, or submit another job, which is measured first"
    faults = [f"{key} is unknown or changes the speed or size of a job. {remedy}" for key in unknown]
    if "num_epochs" in settings:
        faults.append("num_epochs: a job that runs counts in steps. To fix: set num_steps")
    of_loss = [key for key in settings if key.startswith("loss.") and key not in unknown]
    if job.loss is None:
        remedy = "To fix: leave it out, or submit a job with a loss of this name, such as cross-entropy"
        faults += [
            f"{key}: the loss of {job.name} is its model's own, which has no options. {remedy}" for key in of_loss
        ]
    left = [
        key for key in settings if key not in (*unknown, "num_epochs") and (job.loss is not None or key not in of_loss)
    ]
    num_steps, begun = settings.get("num_steps"), job.phases[-1].first_step if job.phases else 0
    if isinstance(num_steps, int) and 0 < num_steps <= begun:
        remedy = f"To fix: give more than {begun}, or submit a job whose batches stay the same"
        faults.append(f"num_steps: {job.name} has changed its batches after {begun} steps. {remedy}")
    own: Mapping[str, Any] = to_json(job)
    # Its model and data are those of the job, which need not be checked again.
    plain = {"name": "changed", "model": {"factory": "builtins:dict"}, "data": {"factory": "builtins:dict"}}
    plain |= {key: own[key] for key in CHANGEABLE_FIELDS if key in own} | {"num_steps": job.num_steps or 1}
    if of_loss and job.loss is not None:
        plain["loss"] = {"name": job.loss, **job.loss_options}
    faults += [f"{each.place[0]}: {each.message}. To fix: {each.remedy}" for each in key_findings(plain, left, at=())]
    of_values = job_faults(with_values(plain, {key: settings[key] for key in left}))
    return faults + [str(each).rstrip(".") for each in of_values if not each.place.startswith("data")]


def with_settings(job: Job, settings: Mapping[str, Any], *, name: str) -> Job:
    """Returns a job with other values at dotted keys. Raises ValueError with all their faults."""
    if faults := change_faults(job, settings):
        raise ValueError("; ".join(faults))
    plain: Mapping[str, Any] = to_json(job)
    values = {f"loss_options.{key[5:]}" if key.startswith("loss.") else key: value for key, value in settings.items()}
    changed: Job = from_json(Job, {**with_values(plain, values), "name": name})
    return changed if changed.num_steps is None or "num_steps" not in values else with_steps(changed, changed.num_steps)


def setting_faults(settings: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the settings of running jobs, with remedies."""
    faults = [
        f"{key} cannot be set. To fix: choose from {', '.join(SETTINGS)}" for key in settings.keys() - {*SETTINGS}
    ]
    for key, value in settings.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        most = MAX_PRIORITY if key == "priority" else math.inf
        if key in SETTINGS and (not is_number or not 0 < value <= most or (key == "steps" and value != int(value))):
            kind = "a whole number" if key == "steps" else "a number"
            up_to = f" and at most {most:.0f} (1 is usual, 2 counts twice)" if most < math.inf else ""
            faults.append(f"{key} must be {kind} above 0{up_to}, got {value!r}")
    return faults or ([] if settings else [f"nothing is set. To fix: give some of {', '.join(SETTINGS)}"])
