"""Adaptations that each technique can train, and their memory besides the training state. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import COMPOSED, DISTILLED, PRUNED, VIRTUAL_TOKENS, Job
from ringmaster.techniques.loss import loss_function_of
from ringmaster.techniques.metric import why_generating
from ringmaster.techniques.technique import Technique

if TYPE_CHECKING:
    from ringmaster.techniques.data import PreparedData

MASK_BYTES, FP32_BYTES = 1, 4  # bytes of a weight's mask entry, and of a number


def why_no_adaptation(technique: Technique, job: Job) -> str | None:
    """Returns why a technique cannot make the adaptation that a job asks for, or None."""
    if isinstance(technique, BlackBox):
        return None  # their `supports` checks the adaptation
    if not job.trains or job.store is not None:
        return f"the job trains no step: {'encode' if job.store else 'rewrite'} is for it"
    if copies_reference(job) and DISTILLED not in technique.adaptations:
        return (
            f"the loss {job.loss} needs a copy of the initial weights beside the model, which {technique.name} has not"
        )
    if job.quantize_base is not None and not technique.takes_4_bits:
        return f"the base's weights are packed, 4 bits each, and {technique.name} divides or moves their rows"
    if job.adapter is not None and job.adapter.dora and not technique.whole_layers:
        return f"a DoRA needs the lengths of whole weights, which {technique.name} divides"
    if job.adaptation is None or job.adaptation.kind in technique.adaptations:
        return None
    needed = {
        DISTILLED: "a teacher in addition to the whole output of each row",
        PRUNED: "gradients that are masked between their exchange and the optimizer",
        COMPOSED: "layers that are called for each of several jobs in one step",
    }[job.adaptation.kind]
    return f"a {job.adaptation.kind} model needs {needed}, which {technique.name} has not"


def drops_out(job: Job) -> bool:
    """Returns whether the job's adapter draws random numbers in training."""
    return job.adapter is not None and job.adapter.dropout > 0


def copies_reference(job: Job) -> bool:
    """Returns whether the job's loss compares with its initial weights, of which it then keeps a frozen copy."""
    loss = loss_function_of(job.loss, job.loss_options)
    has_base = job.adapter is not None and job.adapter.begins_as_base
    return loss is not None and loss.compares and not has_base


def why_no_generation(technique: Technique, job: Job) -> str | None:
    """Returns why a technique cannot write the texts on which a job's loss or metrics are computed, or None."""
    if isinstance(technique, BlackBox):
        return None
    loss = loss_function_of(job.loss, job.loss_options)
    writes_in_steps = loss is not None and loss.generation is not None
    what = f"the loss {loss.name}" if loss and writes_in_steps else why_generating(job.evaluation.metrics)
    if what is None:
        return None
    if not technique.generates:
        return f"{what} generates with the whole model on each device, which {technique.name} has not"
    if job.compile:
        return f"{what} generates sequences that grow, for each of which layers would be compiled again"
    if job.adapter is not None and job.adapter.kind in VIRTUAL_TOKENS:
        return f"{what} generates with a cache of keys and values, to which a {job.adapter.kind} is not added"
    return None


def adaptation_bytes(job: Job, *, num_rows: int, data: PreparedData) -> int:
    """Returns bytes on each device of a whole teacher and its logits for `num_rows`, or of a mask for each weight.

    Raises ValueError where the teacher is unknown, or has another vocabulary than the job.
    """
    adaptation = job.adaptation
    if adaptation is None or not job.trains or adaptation.kind == COMPOSED:
        return 0
    from ringmaster.techniques.models.facts import model_facts
    from ringmaster.techniques.training.adaptation import teacher_model

    student = model_facts(job.model, data=data)
    if adaptation.kind == PRUNED:
        return student.num_parameters * MASK_BYTES
    teacher = model_facts(teacher_model(job, None), data=data)
    if teacher.decoder is None or student.decoder is None:
        return teacher.parameter_bytes
    sizes = [facts.vocab_size for facts in (teacher.decoder, student.decoder)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"distillation: the teacher {adaptation.teacher} has a vocabulary of {sizes[0]} tokens, and the student "
            f"one of {sizes[1]}. To fix: give both the same data.tokenizer and vocab_size"
        )
    return teacher.parameter_bytes + num_rows * teacher.decoder.seq_len * sizes[0] * FP32_BYTES
