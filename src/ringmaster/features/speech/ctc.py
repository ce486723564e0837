"""Connectionist temporal classification: the loss of models that write a token, or none, for each frame of speech."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.compat.transformers import num_frames_of
from ringmaster.techniques import loss

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True)
class Ctc(loss.LossFunction):
    """The mean over rows of -log p(text), p being the sum over all ways to write the text in a row's frames.

    Source: Graves et al., Connectionist Temporal Classification (ICML 2006).

    As in transformers, the model's config says the rest: `ctc_loss_reduction: mean` divides the summand of a row by the
    number of its labels, `sum` does not; under `ctc_zero_infinity` a row with more labels than frames counts as 0; the
    blank is the padding token. Transformers' `sum` is that of the rows of a batch, which here is divided by their
    number.
    """

    name: ClassVar[str] = "ctc"
    kinds: ClassVar[tuple[str, ...]] = (loss.OTHER,)

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each row, and 1 for each."""
        import torch

        from ringmaster.features.speech.trainer import frame_losses

        config: Any = getattr(inputs.model, "config", None)
        if inputs.logits is None or inputs.labels is None or inputs.logits.dim() != 3 or inputs.labels.dim() != 2:
            raise ValueError(
                "loss ctc: it reads logits [rows, frames, tokens] and labels [rows, tokens]. To fix: train a model "
                "such as Wav2Vec2ForCTC on data of kind speech-text"
            )
        reduction = getattr(config, "ctc_loss_reduction", None)
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"loss ctc: model.config.ctc_loss_reduction is {reduction!r}. To fix: set it to "
                f"{' or '.join(REDUCTIONS)}"
            )
        labels = inputs.labels
        is_counted = (labels >= 0) & (labels != config.pad_token_id)
        num_labels = is_counted.sum(-1)
        losses = frame_losses(
            inputs.logits,
            labels,
            is_counted=is_counted,
            num_frames=frames_of_rows(inputs),
            blank=config.pad_token_id,
            zero_infinity=config.ctc_zero_infinity,
        )
        return losses / num_labels.clamp(min=1) if reduction == "mean" else losses, torch.ones_like(losses)

    def written(self, inputs: loss.LossInputs) -> list[list[int]] | None:
        """Returns the likeliest token of each frame of speech, equal neighbours joined, without blanks."""
        if inputs.logits is None:
            return None
        blank = inputs.model.config.pad_token_id
        rows = zip(inputs.logits.argmax(-1).tolist(), frames_of_rows(inputs).tolist(), strict=True)
        return [[token for token, _ in groupby(row[:number]) if token != blank] for row, number in rows]


def frames_of_rows(inputs: loss.LossInputs) -> Tensor:
    """Returns the frames of each row that are speech, [rows]; all, where samples have no mask, as in transformers."""
    import torch

    mask = inputs.batch.get("attention_mask")
    samples = inputs.batch["input_values"] if mask is None else mask
    counts = torch.full_like(samples[:, 0], samples.shape[1], dtype=torch.long) if mask is None else samples.sum(-1)
    lengths: Tensor = num_frames_of(inputs.model, counts)
    return lengths.long()
