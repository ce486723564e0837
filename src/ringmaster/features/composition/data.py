"""The data of jobs that train a common component: a sample holds samples of each job, in the order of its own stream.

With global batches of B_0, B_1, ... samples, a composite sample has n_j = B_j / gcd(B_0, B_1, ...) samples of job j,
and a step has gcd(B_0, B_1, ...) composite samples: of every job the batch that the job would train on alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques.data import Dataset, Indices, PreparedData, fetch, open_data, prepare, sampler_of
from ringmaster.techniques.data.samples import PaddedDataset, Sampler
from ringmaster.techniques.data_source import DataSource, sample_tensors
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec

if TYPE_CHECKING:
    from torch import Tensor


class CompositeData(DataSource):
    """The data of several jobs, in the order of `kwargs["jobs"]`, as JSON."""

    name = "composite"
    pads = True

    def check(self, spec: DataSpec) -> None:
        """Raises ValueError where there are no jobs; their own specs are checked when their data is prepared."""
        if "jobs" not in spec.kwargs:
            raise ValueError(
                "data: kind composite is the data of jobs with a common component. To fix: name these jobs in "
                "shared_components (docs/adaptations.md), and give another kind"
            )

    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Prepares the data of each job."""
        jobs = jobs_of(spec)
        data = [prepare(job.data, cache_dir=cache_dir) for job in jobs]
        training, held_out = _open(jobs, data, cache_dir=cache_dir)
        sample = training[0]
        faults = [
            f"job {job.name}: {fault}" for job, own in zip(jobs, data, strict=True) for fault in own.training_faults
        ]
        return PreparedData(
            name=" and ".join(dict.fromkeys(own.name for own in data)),
            digest=digest([[own.digest for own in data], training.rows_each]),
            num_samples=len(training),
            num_held_out=len(held_out),
            kind="other",
            source=" and ".join(dict.fromkeys(own.source for own in data)),
            tensors=sample_tensors(sample, {name: tuple(value.shape) for name, value in sample.items()}),
            training_faults=tuple(faults),
            parts=tuple({"job": to_json(job), "data": to_json(own)} for job, own in zip(jobs, data, strict=True)),
        )

    def open(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> tuple[Dataset, Dataset]:
        """Opens the samples of each job."""
        jobs = jobs_of(spec)
        pinned = (
            [None] * len(jobs) if prepared is None else [from_json(PreparedData, p["data"]) for p in prepared.parts]
        )
        data = [prepare(job.data, cache_dir=cache_dir, pinned=own) for job, own in zip(jobs, pinned, strict=True)]
        return _open(jobs, data, cache_dir=cache_dir)


def jobs_of(spec: DataSpec) -> list[Job]:
    """Returns the jobs of a composite."""
    return [from_json(Job, job) for job in spec.kwargs["jobs"]]


def _open(
    jobs: Sequence[Job], data: Sequence[PreparedData], *, cache_dir: Path
) -> tuple[CompositeSamples, CompositeSamples]:
    opened = [open_data(job.data, cache_dir=cache_dir, prepared=own) for job, own in zip(jobs, data, strict=True)]
    common = math.gcd(*(job.global_batch_size for job in jobs))
    rows_each = tuple(job.global_batch_size // common for job in jobs)
    training = [each for each, _ in opened]
    samplers = [sampler_of(job, samples) for job, samples in zip(jobs, training, strict=True)]
    return (
        CompositeSamples(parts=training, rows_each=rows_each, samplers=samplers, seeds=[job.seed for job in jobs]),
        CompositeSamples(parts=[each for _, each in opened], rows_each=rows_each),
    )


@dataclass(frozen=True, kw_only=True)
class CompositeSamples:
    """Samples of several data sets at once; sample i has those at the places i n ... (i + 1) n - 1 of each stream.

    rows_each: n of each data set.
    samplers, seeds: of the jobs' training streams, which have no end; () for the rows of the data sets as they are.
    """

    parts: Sequence[Dataset]
    rows_each: tuple[int, ...]
    samplers: Sequence[Sampler] = ()
    seeds: Sequence[int] = ()

    @property
    def is_stream(self) -> bool:
        """Whether sample i is the one at place i of a job's stream."""
        return bool(self.samplers)

    @property
    def width(self) -> int:
        """The largest width of padded samples; 0 without any."""
        return max((part.width for part in self.parts if isinstance(part, PaddedDataset)), default=0)

    def __len__(self) -> int:
        """Returns how many samples there are until the first data set ends; of a stream at least one."""
        lengths = [len(part) // rows for part, rows in zip(self.parts, self.rows_each, strict=True)]
        return max(min(lengths), int(self.is_stream))

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {name: value[0] for name, value in self.rows([index]).items()}

    def lengths(self) -> NDArray[np.int64]:
        """Returns the length of each sample, the longest of its rows: [samples]."""
        return np.array([self.longest([index]) for index in range(len(self))])

    def longest(self, indices: Indices, /) -> int:
        """Returns the length of the longest row of some samples."""
        padded = ((i, part) for i, part in enumerate(self.parts) if isinstance(part, PaddedDataset))
        return max((part.longest(self._rows_of(i, indices)) for i, part in padded), default=0)

    def rows(self, indices: Indices, /, *, width: int | None = None) -> dict[str, Tensor]:
        """Returns samples, stacked: {"part0.NAME": [len(indices), n, ...]}; padded to `width` or its data set's own."""
        from ringmaster.techniques.training.dropout import seed_generators

        batch: dict[str, Tensor] = {}
        for index, (part, num_rows) in enumerate(zip(self.parts, self.rows_each, strict=True)):
            places = self._places(index, indices)
            seeds = [(self.seeds[index] if self.is_stream else 0, place) for place in places]
            rows = fetch(
                part,
                self._rows_of(index, indices),
                before_each=lambda place, seeds=seeds: seed_generators(*seeds[place]),  # type: ignore[misc]
                width=min(width, part.width) if width and isinstance(part, PaddedDataset) else None,
            )
            shape = (len(indices), num_rows)
            batch |= {f"part{index}.{name}": each.reshape(*shape, *each.shape[1:]) for name, each in rows.items()}
        return batch

    def _places(self, index: int, indices: Indices) -> list[int]:
        num_rows = self.rows_each[index]
        return [int(i) * num_rows + row for i in indices for row in range(num_rows)]

    def _rows_of(self, index: int, indices: Indices) -> Indices:
        places = self._places(index, indices)
        return self.samplers[index].at(places) if self.is_stream else places
