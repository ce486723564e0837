"""Optional features, a package each, which the core reaches through registries and hooks alone.

A feature's package has any of these modules, and the core imports those of the kind that it needs:

    job         its values in a job: keys, rules, parents (`ringmaster.techniques.job_features.JobFeature`); keys that
                only batch files have, of a job or of the whole batch (`FileKeys` there); kinds of data that are
                inferred (`ringmaster.techniques.data.inference`), columns that are decisive for kinds of others
                (`ringmaster.techniques.data.row_kind`), and what data determines of a model's config
                (`ringmaster.techniques.models.architectures`)
    trainer     its callbacks in training (`ringmaster.techniques.training.callbacks`), and inputs of models in
                another form than batches have (`ringmaster.techniques.training.bound_loss`); what models begin their
                targets with (`ringmaster.techniques.models.build`), and how they write answers
                (`ringmaster.techniques.training.generation`)
    batch       what it does with batch files: entries, further jobs, rules between jobs
                (`ringmaster.tasks.batch.file_hooks`), and further keys of what makes production models due
                (`ringmaster.tasks.retraining.due_keys`)
    terms       what it adds to the terms of plans (`ringmaster.tasks.planning.term_features`)
    execute     rules of what a job may do next (`ringmaster.tasks.execution.job_rules`), what it keeps in the records
                of jobs (`ringmaster.tasks.storage.journal`), hooks of the executor
                (`ringmaster.tasks.execution.executor_hooks`), policies that steer a batch
                (`ringmaster.tasks.execution.steering`), what nodes of a pool need of a batch
                (`ringmaster.tasks.pool.node_hooks`), and requests about running jobs
                (`ringmaster.tasks.control.request_handler`)
    commands    its commands, which join the command line, and options of others (`ringmaster.flows.cli`); what it
                shows in `ringmaster status` (`ringmaster.flows.reports.watch`); schemas of its files
                (`ringmaster.flows.file_schemas`)
    pages       what it adds to the records of jobs and models, and what follows these records
                (`ringmaster.tasks.recording.record_hooks`)
    routes      its HTTP routes of the server of a pool's metrics (`ringmaster.flows.services.metrics_server`)
    suite       its kinds of tests of models, in files of slices and assertions
                (`ringmaster.tasks.evaluation.suite_tests`)
    forms       its sections of the form in Prefect's UI that changes running jobs (`ringmaster.flows.job_forms`)
    retraining  its rules for new data of production models (`ringmaster.flows.retraining.new_data_rules`)
    resident    the processes that stay after a command (`ringmaster.flows.resident_processes`)
    sweep       how it compares the trials of sweeps (`ringmaster.tasks.sweeping.ranking`), its policies of early
                stopping (`ringmaster.tasks.sweeping.early_stopping`), its rules that end sweeps
                (`ringmaster.tasks.sweeping.stop_rules`), and its sections of their results
                (`ringmaster.tasks.sweeping.results`)

Techniques, losses, metrics, families of metrics, data sources, objectives and engines of features are defined in any of
their modules. The package's own `__init__.py` lists their dotted names in `TECHNIQUES`, `LOSSES`, `METRICS`,
`METRIC_FAMILIES`, `DATA_SOURCES`, `OBJECTIVES` and `ENGINES`, and imports none of them; `FORMER_TECHNIQUES` has what
stored orders of earlier releases call them, and `FORMER_MODULES` by which names they find modules. Those of installed
distributions have entry points. `MODEL_LOSSES` has losses of models by the endings of their class names.

Installed distributions add features by entry points of the group `ringmaster.features`, whose values are packages. No
feature imports another one. What is wrong with them is refused before anything starts (`ringmaster.feature_check`);
commands that only read leave out a module that cannot be used.
"""

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ENTRY_POINT_GROUP = "ringmaster.features"
ORDER = (
    "ringmaster.features.quantized_base",
    "ringmaster.features.composition",
    "ringmaster.features.adaptation",
    "ringmaster.features.local_updates",
    "ringmaster.features.fp8",
    "ringmaster.features.quantization_aware",
    "ringmaster.features.kernels",  # before what reads the state of the optimizer, which kernels may replace
    "ringmaster.features.target",
    "ringmaster.features.stores",
    "ringmaster.features.untrusted",
    "ringmaster.features.warm_start",
    "ringmaster.features.ludwig",
    "ringmaster.features.preference",
    "ringmaster.features.embeddings",
    "ringmaster.features.on_policy",
    "ringmaster.features.reward_jobs",
    "ringmaster.features.class_metrics",
    "ringmaster.features.sequence_metrics",
    "ringmaster.features.loss_teacher",
    "ringmaster.features.external_trainers",
    "ringmaster.features.environment",
    "ringmaster.features.clones",
    "ringmaster.features.sweep_objectives",
    "ringmaster.features.quotas",  # before the tariffs, whose question leaves no others
    "ringmaster.features.tariffs",
    "ringmaster.features.technique_report",
    "ringmaster.features.what_if",
    "ringmaster.features.importance",
    "ringmaster.features.expected_gain",
    "ringmaster.features.rung_evaluation",
    "ringmaster.features.live_page",
    "ringmaster.features.foreign_models",
    "ringmaster.features.trackers",
    "ringmaster.features.image_text",
    "ringmaster.features.speech",
    "ringmaster.features.lm_eval",
    "ringmaster.features.retraining_value",
    "ringmaster.features.undo",
    "ringmaster.features.behaviour_tests",
    "ringmaster.features.reproduction",
    "ringmaster.features.bisection",
    "ringmaster.features.diagnosis",
    "ringmaster.features.daemon",
    "ringmaster.features.endpoint",
    "ringmaster.features.slurm",
    "ringmaster.features.pbs",
    "ringmaster.features.ray",
)
"""Packages of built-in features in the order in which their hooks are called: callbacks change a model one after
another, keys are in this order in files and records, and commands in the help. A new one needs a line here only where
its hooks must come before those of another."""
_FOLDERS = sorted(each.parent.name for each in Path(__file__).parent.glob("*/__init__.py"))
BUILTIN = tuple(dict.fromkeys([*ORDER, *(f"{__name__}.{each}" for each in _FOLDERS)]))
"""The packages of the features of Ringmaster: those of `ORDER`, then the other folders here by their names. Those of
other distributions follow."""


class FeaturePackage(NamedTuple):
    """The package of a feature. distribution: what is installed with it; "" for what Ringmaster has itself."""

    name: str
    distribution: str = ""

    def __str__(self) -> str:
        return f"{self.name} (distribution {self.distribution})" if self.distribution else self.name

    def module(self, kind: str) -> ModuleType | None:
        """Returns its module of a kind, such as "trainer"; None where it has none, or none that can be used."""
        if self.distribution:
            from ringmaster.feature_hooks import examined

            return examined(self, kind)[0]
        file = Path(__file__).with_name(self.name.rpartition(".")[2]) / f"{kind}.py"  # without importing the package
        return importlib.import_module(f"{self.name}.{kind}") if file.is_file() else None


@cache
def packages(*, only_builtin: bool = False) -> tuple[FeaturePackage, ...]:
    """Returns the packages of all features."""
    builtin = tuple(map(FeaturePackage, BUILTIN))
    return builtin if only_builtin else (*builtin, *installed_packages())


@cache
def installed_packages() -> tuple[FeaturePackage, ...]:
    """Returns the packages of features that installed distributions add, by the names of these; each package once."""
    from ringmaster import registry  # whose imports take longer than some commands

    first: dict[str, FeaturePackage] = {}
    for entry in registry.installed_entries(ENTRY_POINT_GROUP):
        first.setdefault(entry.value, FeaturePackage(entry.value, entry.distribution))
    return tuple(package for name, package in first.items() if name not in BUILTIN)


@cache
def modules_by_package(kind: str, *, only_builtin: bool = False) -> dict[FeaturePackage, ModuleType]:
    """Returns the modules of a kind, such as "trainer", of all features that have one, in the order of `packages`.

    Modules of installed distributions that cannot be used are left out, with a line in the log.
    """
    every = {package: package.module(kind) for package in packages(only_builtin=only_builtin)}
    return {package: module for package, module in every.items() if module is not None}


def modules(kind: str, *, only_builtin: bool = False) -> tuple[ModuleType, ...]:
    """Returns the modules of `modules_by_package`."""
    return tuple(modules_by_package(kind, only_builtin=only_builtin).values())


def listed(kind: str, name: str, *, only_builtin: bool = False) -> Iterator[Any]:
    """Yields what the modules of a kind list under a name, such as "JOB_RULES", in the order of `packages`.

    A module that has no such list adds nothing.
    """
    for module in modules(kind, only_builtin=only_builtin):
        yield from getattr(module, name, ())


@cache
def dotted_names(kind: str) -> dict[str, str]:
    """Returns what the built-in packages themselves list under a name, such as "TECHNIQUES": dotted names, by name."""
    own = (getattr(importlib.import_module(package), kind, {}) for package in BUILTIN)
    return {name: path for names in own for name, path in names.items()}


def current_module(name: str) -> str:
    """Returns the name of the module that a dotted name leads to: of features, also by a name of earlier releases."""
    return dotted_names("FORMER_MODULES").get(name, name)
