"""What is known of jobs before anything runs: their data, their models' sizes, and what could train them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from techniques.job import Job
from techniques.technique import GangShape


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An option that could train a job, not measured yet; it takes `num_ranks` worker processes."""

    technique: str
    config: Mapping[str, Any]
    num_devices: int
    num_ranks: int
    least_bytes: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a technique cannot train a job on so many devices."""

    technique: str
    num_devices: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of a job before any trial; of one technique and gang size, the cheapest-looking candidate first.

    data, facts: the JSON forms of `engine.data.PreparedData` and `engine.models.ModelFacts`.
    """

    job: str
    data: Mapping[str, Any]
    facts: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, kw_only=True)
class SurveyOrder:
    """Survey `jobs` for gangs of each shape; techniques by name, with the dotted paths of their classes."""

    jobs: tuple[Job, ...]
    shapes: tuple[GangShape, ...]
    techniques: Mapping[str, str]
    cache_dir: str
    cores: tuple[int, ...] = ()
    import_paths: tuple[str, ...] = ()
