"""What models of speech say of the rows that they can learn: completes the data of their jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.features.speech.job import CTC_SUFFIX
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.data.inference import architecture_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.models.architectures import CONFIG, architecture
from ringmaster.techniques.models.model_folders import read_json

KIND = "speech-text"
FRAMES = ("conv_kernel", "conv_stride")
"""The fields of a config with the widths and the steps of the convolutions that make frames of samples."""
FURTHER_FRAMES = ("add_adapter", "squeeze_factor")
"""Fields of models that make fewer frames of these, whose number is then not known here."""
POSITIONS = "max_target_positions"


class SpeechOfModels(BatchFileHook):
    """Makes rows be refused whose text does not fit into the frames, or the positions, of a job's model."""

    def completed(self, jobs: Sequence[Job], batch: Section) -> Sequence[Job]:
        """Returns the jobs, of which those of speech have the frames and the positions of their models."""
        return [
            replace(job, data=with_limits_of(job.data, job.model)) if job.data.kind == KIND else job for job in jobs
        ]


def with_limits_of(spec: DataSpec, model: ModelSpec) -> DataSpec:
    """Returns data of speech with what a model can learn of it, unless the data says it."""
    name = architecture_of(model) or ""
    config = _config(name, model)
    known = [config.get(field) for field in FRAMES]
    if name.endswith(CTC_SUFFIX) and all(known) and not any(config.get(field) for field in FURTHER_FRAMES):
        frames = [[*map(int, each)] for each in zip(*known, strict=False)]
        return replace(spec, kwargs={"frames": frames, **spec.kwargs})
    if spec.seq_len is None and isinstance(most := config.get(POSITIONS), int):
        return replace(spec, seq_len=most)
    return spec


def _config(name: str, model: ModelSpec) -> Mapping[str, Any]:
    """What is known of a model's config without a network, with the defaults of its class."""
    try:
        defaults = architecture(name).config_class().to_dict() if name else {}
    except ValueError:  # which the check of the model says
        defaults = {}
    of_base = {} if model.from_pretrained is None else read_json(Path(model.from_pretrained) / CONFIG)
    return {**defaults, **of_base, **model.config}


BATCH_FILE_HOOKS = (SpeechOfModels(),)
