"""What the modules of features list, and the faults of features that installed distributions add.

`HOOKS` has every list that Ringmaster reads, by the kind of module and its name: what its entries are, and the names
that they take, such as keys of jobs. Two features that take one name cannot be used together.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ringmaster.features import FeaturePackage, modules
from ringmaster.findings import Finding
from ringmaster.registry import UNNAMED, resolve

logger = logging.getLogger(__name__)
CLI = "ringmaster.flows.cli"
left_out: set[FeaturePackage] = set()
"""The features of which this process has left out a module."""


@dataclass(frozen=True)
class Form:
    """The form of a list's entries. text: completes "lists ...". is_met: whether an entry has the form."""

    text: str
    is_met: Callable[[Any], bool]


def subclasses_of(path: str) -> Form:
    """Returns the form of classes that derive from the one with a dotted name."""
    return Form(f"subclasses of {path}", lambda each: isinstance(each, type) and issubclass(each, resolve(path)))


def objects_of(path: str) -> Form:
    """Returns the form of objects of the class with a dotted name."""
    return Form(f"objects of {path}", lambda each: isinstance(each, resolve(path)))


def named(text: str, is_met: Callable[[Any], bool]) -> Form:
    """Returns the form of pairs of a name and something else."""
    return Form(text, lambda each: isinstance(each, tuple) and len(each) == 2 and is_name(each[0]) and is_met(each[1]))


def is_name(value: object) -> bool:
    """Whether a value is a text with at least a letter."""
    return isinstance(value, str) and value != ""


def are_functions(value: object) -> bool:
    """Whether a value is a sequence of functions."""
    return isinstance(value, Sequence) and all(map(callable, value))


def is_command_group(value: object) -> bool:
    """Whether a value is an application of Typer, its name and the panel that shows it."""
    return (
        isinstance(value, tuple) and len(value) == 3 and hasattr(value[0], "command") and all(map(is_name, value[1:]))
    )


FUNCTIONS = Form("functions", callable)
PAIRS = named("pairs of a name and something else", lambda each: True)


@dataclass(frozen=True, kw_only=True)
class HookList:
    """A list in modules of one kind.

    form: of its entries. is_mapping: whether it is a mapping, whose items are the entries, and not a sequence.
    is_single: whether it is the one entry itself.
    of: what the names are that an entry takes, such as "the key of jobs"; several where it takes them in all of these.
    names: returns the names that an entry takes.
    core: returns the names that Ringmaster itself has.
    """

    form: Form
    is_mapping: bool = False
    is_single: bool = False
    of: tuple[str, ...] = ()
    names: Callable[[Any], Iterable[str]] = lambda entry: ()
    core: Callable[[], Iterable[str]] = tuple

    def entries(self, value: Any) -> list[Any]:
        """Returns the entries of a list. Raises TypeError, with what they must be, where they are something else."""
        whole = "is" if self.is_single else "is a mapping of" if self.is_mapping else "is a tuple of"
        if self.is_single:
            entries = [value]
        elif isinstance(value, Mapping if self.is_mapping else Sequence):
            entries = [*(value.items() if self.is_mapping else value)]
        else:
            raise TypeError(f"{whole} {self.form.text}")
        if not all(map(self.form.is_met, entries)):
            raise TypeError(f"{whole} {self.form.text}")
        return entries


def own_fields(path: str) -> tuple[str, ...]:
    """Returns the fields of the dataclass or model with a dotted name, without those that features have added.

    Features extend a model by a subclass of the same name.
    """
    kind = resolve(path)
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    return tuple([each for each in kind.__mro__ if each.__name__ == kind.__name__][-1].model_fields)


def job_keys(kind: Any) -> Iterable[str]:
    """Returns the keys of a subclass of `FileKeys`."""
    keys: Iterable[str] = kind.job_keys()
    return keys


def form_title(kind: Any) -> Iterable[str]:
    """Returns the title of a section of a form."""
    return (str(kind.model_config.get("title") or kind.__name__),)


def command_name(command: Any) -> str:
    """Returns the name by which people call a command."""
    return str(command.__name__.rstrip("_").replace("_", "-"))  # `import_` may not be called `import`


def with_options(name: str, command: Any) -> Iterable[str]:
    """Returns the name of a command, and each of its options after it."""
    return [name, *(option_of(name, each) for each in inspect.signature(command).parameters)]


def option_of(name: str, parameter: str) -> str:
    """Returns the name of a command and that of the option of its parameter."""
    return f"{name} --{parameter.replace('_', '-')}"


def names_of_commands(commands: tuple[str, Sequence[Any]]) -> Iterable[str]:
    """Returns the commands of a panel or a group of commands, and their options; a group has a name in lower case."""
    group = f"{commands[0]} " if commands[0].islower() else ""
    return [each for call in commands[1] for each in with_options(f"{group}{command_name(call)}", call)]


def core_commands() -> Iterable[str]:
    """Returns the commands of Ringmaster itself, their options, and the groups of commands."""
    for commands in resolve(f"{CLI}:COMMANDS").items():
        yield from names_of_commands(commands)
    for group, app in resolve(f"{CLI}:OWN_GROUPS").items():
        yield group
        for each in app.registered_commands:
            if each.callback.__module__.startswith("ringmaster.flows."):
                yield from with_options(f"{group} {each.name or command_name(each.callback)}", each.callback)


def added_options(entry: tuple[str, Callable[[Any], Any]]) -> Iterable[str]:
    """Returns the options that a function adds to a command, or replaces, after the name of the command.

    A function may read the parameters of the command that it is for.
    """
    tables = [getattr(each, "COMMANDS", {}) for each in (importlib.import_module(CLI), *modules("commands"))]
    every = (each for table in tables for commands in table.values() for each in commands)

    def command(**options: Any) -> None:
        """Has the parameters of the real one, which stays as it is."""

    real = next((each for each in every if each.__name__ == entry[0]), lambda: None)
    command.__name__ = entry[0]
    command.__signature__ = inspect.signature(real, eval_str=True)  # type: ignore[attr-defined]
    own = _values_of_options(command)
    result = _values_of_options(entry[1](command))
    return [option_of(command_name(command), name) for name, value in result.items() if own.get(name) != value]


def _values_of_options(command: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the annotations and the defaults of a command's parameters."""
    every = inspect.signature(command, eval_str=True).parameters.values()
    return {each.name: (each.annotation, each.default) for each in every}


_JOB_KEYS: Any = {
    "of": ("key of jobs",),
    "names": job_keys,
    "core": lambda: (
        *own_fields("ringmaster.techniques.job:Job"),
        *own_fields("ringmaster.tasks.batch.schema:JobEntry"),
    ),
}
HOOKS: Mapping[str, Mapping[str, HookList]] = {
    "job": {
        "JOB_FEATURES": HookList(form=subclasses_of("ringmaster.techniques.job_features:JobFeature"), **_JOB_KEYS),
        "ENTRY_KEYS": HookList(form=subclasses_of("ringmaster.techniques.job_features:FileKeys"), **_JOB_KEYS),
        "BATCH_KEYS": HookList(
            form=subclasses_of("ringmaster.techniques.job_features:FileKeys"),
            of=("key of batches", "key of sweeps"),
            names=job_keys,
            core=lambda: own_fields("ringmaster.tasks.batch.schema:BatchEntry"),
        ),
        "INFERRED_KINDS": HookList(
            form=PAIRS,
            of=("kind of data that is inferred",),
            names=lambda entry: entry[:1],
            core=lambda: ("chat", *resolve("ringmaster.techniques.data.inference:KINDS")),
        ),
        "DECISIVE_COLUMNS": HookList(form=PAIRS),
        "CONFIG_FIELDS": HookList(form=FUNCTIONS),
    },
    "trainer": {
        "TARGET_STARTS": HookList(form=FUNCTIONS),
        "ANSWER_WRITERS": HookList(form=FUNCTIONS),
        "TRAINER_CALLBACKS": HookList(form=subclasses_of("ringmaster.techniques.training.callbacks:TrainerCallback")),
        "UPDATE_RULES": HookList(form=subclasses_of("ringmaster.techniques.training.update_rule:UpdateRule")),
        "MODEL_INPUTS": HookList(form=FUNCTIONS),
        "WITHOUT_VALUES": HookList(form=named("names and functions", callable), is_mapping=True),
    },
    "batch": {
        "BATCH_FILE_HOOKS": HookList(form=objects_of("ringmaster.tasks.batch.file_hooks:BatchFileHook")),
        "DUE_KEYS": HookList(
            form=subclasses_of("ringmaster.tasks.retraining.due_keys:DueKeys"),
            of=("key of `due`",),
            names=job_keys,
            core=lambda: own_fields("ringmaster.tasks.retraining.selection:DueEntry"),
        ),
    },
    "terms": {
        "TERMS_FEATURES": HookList(
            form=subclasses_of("ringmaster.tasks.planning.term_features:TermsFeature"),
            of=("key of terms",),
            names=lambda kind: (kind.key,),
        )
    },
    "execute": {
        "RECORD_FEATURES": HookList(
            form=subclasses_of("ringmaster.tasks.storage.journal:RecordFeature"),
            of=("field of the records of jobs",),
            names=lambda kind: [each.name for each in fields(kind)],
            core=lambda: own_fields("ringmaster.tasks.storage.journal:JobRecord"),
        ),
        "JOB_RULES": HookList(form=objects_of("ringmaster.tasks.execution.job_rules:JobRule")),
        "EXECUTOR_HOOKS": HookList(form=subclasses_of("ringmaster.tasks.execution.executor_hooks:ExecutorHook")),
        "STEERING": HookList(form=subclasses_of("ringmaster.tasks.execution.steering:FeaturePolicy")),
        "STEERED_VALUES": HookList(
            form=named("pairs of a name and a type", lambda each: isinstance(each, type)),
            of=("key of steering requests",),
            names=lambda entry: entry[:1],
            core=lambda: own_fields("ringmaster.tasks.execution.steering:SteeringRequest"),
        ),
        "NODE_HOOKS": HookList(form=objects_of("ringmaster.tasks.pool.node_hooks:NodeHook")),
        "REQUESTS": HookList(
            form=named("kinds of requests and functions", callable),
            is_mapping=True,
            of=("kind of requests",),
            names=lambda entry: (str(entry[0]),),
            core=lambda: map(str, resolve("ringmaster.tasks.control.requests:RequestKind")),
        ),
    },
    "pages": {"RECORD_HOOKS": HookList(form=objects_of("ringmaster.tasks.recording.record_hooks:RecordHook"))},
    "commands": {
        "COMMANDS": HookList(
            form=named("panels, or groups of commands, and tuples of functions", are_functions),
            is_mapping=True,
            of=("command",),
            names=names_of_commands,
            core=core_commands,
        ),
        "COMMAND_GROUPS": HookList(
            form=Form("applications of Typer, their names and their panels", is_command_group),
            of=("command",),
            names=lambda group: (group[1],),
        ),
        "OPTIONS": HookList(
            form=named("names of commands and functions", callable),
            is_mapping=True,
            of=("command",),
            names=added_options,
        ),
        "FILE_SCHEMAS": HookList(
            form=named("pairs of a kind of file and a function", callable),
            of=("kind of file",),
            names=lambda entry: entry[:1],
            core=lambda: resolve("ringmaster.flows.file_schemas:SCHEMAS"),
        ),
        "STATUS_RUNS": HookList(form=FUNCTIONS),
    },
    "routes": {
        "ROUTES": HookList(form=Form("a function", callable), is_single=True),
        "KEYED_ROUTES": HookList(form=Form("a function", callable), is_single=True),
        "PAGES": HookList(
            form=named("names and paths", is_name),
            is_mapping=True,
            of=("page of a pool",),
            names=lambda entry: entry[:1],
            core=lambda: ("prefect", "mlflow", "metrics", "work_pool", "home", "password_file"),
        ),
    },
    "forms": {
        "JOB_FORMS": HookList(
            form=subclasses_of("ringmaster.flows.job_forms:JobForm"),
            of=("section of the form that changes jobs",),
            names=form_title,
            core=lambda: [
                title
                for name in ("SetAction", "StateAction")
                for title in form_title(resolve(f"ringmaster.flows.job_forms:{name}"))
            ],
        )
    },
    "suite": {
        "SUITE_TESTS": HookList(
            form=objects_of("ringmaster.tasks.evaluation.suite_tests:SuiteTests"),
            of=("key of files of tests",),
            names=lambda tests: tests.keys.model_fields,
            core=lambda: own_fields("ringmaster.tasks.evaluation.suite:Suite"),
        )
    },
    "resident": {
        "RESIDENT_PROCESSES": HookList(form=objects_of("ringmaster.flows.resident_processes:ResidentProcesses"))
    },
    "retraining": {
        "NEW_DATA_RULES": HookList(form=objects_of("ringmaster.flows.retraining.new_data_rules:NewDataRule"))
    },
    "sweep": {
        "RANKINGS": HookList(
            form=subclasses_of("ringmaster.tasks.sweeping.ranking:Ranking"),
            of=("key of sweeps",),
            names=lambda kind: kind.keys,
            core=lambda: own_fields("ringmaster.flows.sweep_form:Sweep"),
        ),
        "STOPPING_POLICIES": HookList(
            form=subclasses_of("ringmaster.tasks.sweeping.early_stopping:StoppingPolicy"),
            of=("key of early stopping",),
            names=lambda kind: set(kind.__annotations__) & set(kind.model_fields),
            core=lambda: own_fields("ringmaster.tasks.sweeping.early_stopping:StoppingPolicy"),
        ),
        "STOP_RULES": HookList(
            form=subclasses_of("ringmaster.tasks.sweeping.stop_rules:StopRule"),
            of=("key of `stop_when`",),
            names=lambda kind: (kind.key,),
        ),
        "SECTIONS": HookList(form=FUNCTIONS),
        "PREPARATIONS": HookList(form=FUNCTIONS),
    },
}
OF_PROCESSES = "trainer"
"""The kind of module that only processes that train import: that takes seconds."""
OF_PACKAGES = {
    "TECHNIQUES": "ringmaster.techniques.registry:TECHNIQUES",
    "DATA_SOURCES": "ringmaster.techniques.data_source:DATA_SOURCES",
    "LOSSES": "ringmaster.techniques.loss:LOSSES",
    "METRICS": "ringmaster.techniques.metric:METRICS",
    "METRIC_FAMILIES": "ringmaster.techniques.metric:METRIC_FAMILIES",
    "ENGINES": "ringmaster.tasks.execution.engine_registry:ENGINES",
    "OBJECTIVES": "ringmaster.tasks.planning.objectives:OBJECTIVES",
}
"""The registries of what the packages of built-in features list themselves. Installed ones have entry points."""
ONLY_BUILTIN = {
    "MODEL_LOSSES": "name the loss in jobs (`loss`)",
    "FORMER_TECHNIQUES": "keep the former module, which imports the technique",
    "FORMER_MODULES": "keep the former module, which imports the present one",
}
"""Further lists of the packages of built-in features, with what installed ones do instead."""


def uninstall(distribution: str) -> str:
    """Returns how a person removes a distribution."""
    return "delete its folder *.dist-info" if distribution == UNNAMED else f"`pip uninstall {distribution}`"


def remedy_for(package: FeaturePackage) -> str:
    """Returns what a person can do about the faults of an installed feature."""
    return f"{uninstall(package.distribution)}, or ask its author for a release that is mended"


Examination = tuple[ModuleType | None, tuple[Finding, ...]]


@cache
def examined(package: FeaturePackage, kind: str) -> Examination:
    """Returns a module of the feature of an installed distribution, and its faults; None where it has none, or any.

    What cannot be used is left out as a whole module, with a line in the log, so that commands that only read go on.
    Nothing starts with it: see `ringmaster.feature_check`.
    """
    name = f"{package.name}.{kind}"
    try:
        if importlib.util.find_spec(name) is None:
            return None, ()
        module = importlib.import_module(name)
        faults = [*_faults_of(module, kind, package=package)]
    except Exception as error:  # noqa: BLE001 - of another's code; it is reported
        faults = [Finding((), f"{name} cannot be imported: {type(error).__name__}: {error}", remedy_for(package))]
    for fault in faults:
        left_out.add(package)
        logger.warning("the feature %s is left out: %s. To fix: %s", package, fault.message, fault.remedy)
    return (None, tuple(faults)) if faults else (module, ())


def _faults_of(module: ModuleType, kind: str, *, package: FeaturePackage) -> Iterator[Finding]:
    lists = {name: hook for name, hook in HOOKS[kind].items() if hasattr(module, name)}
    for name, hook in lists.items():
        try:
            hook.entries(getattr(module, name))
        except TypeError as error:
            yield Finding((), f"{module.__name__}: {name} is something else", f"write what {error}")
    for name in sorted(_assigned(module.__name__) - HOOKS[kind].keys()):
        close = difflib.get_close_matches(name, HOOKS[kind], n=1, cutoff=0.9) if name.isupper() else []
        if close and close[0] not in lists and isinstance(getattr(module, name, None), (list, tuple, Mapping)):
            yield Finding((), f"{module.__name__}: {name} is read by nothing", f"write {close[0]}")


def layout_faults(package: FeaturePackage) -> Iterator[Finding]:
    """Yields why modules of the feature of an installed distribution are not read, by their names and texts."""
    try:
        spec = importlib.util.find_spec(package.name)
        own = importlib.import_module(package.name)
    except Exception as error:  # noqa: BLE001 - of another's code; it is reported
        yield Finding((), f"{package} cannot be imported: {type(error).__name__}: {error}", remedy_for(package))
        return
    folders = spec.submodule_search_locations if spec is not None else None
    if folders is None:
        yield Finding((), f"the feature {package} is a module", "name the package that has its modules")
        return
    names = {each.name for each in pkgutil.iter_modules(map(str, folders))}  # also packages and compiled modules
    for name in sorted(names - HOOKS.keys()):
        for kind in difflib.get_close_matches(name, sorted(HOOKS.keys() - names), n=1, cutoff=0.8):
            for list_name in sorted(_assigned(f"{package.name}.{name}") & HOOKS[kind].keys()):
                problem = f"{package}: {name}.py has {list_name}, which is read of {kind}.py alone"
                yield Finding((), problem, f"rename {name}.py to {kind}.py")
    if not names & HOOKS.keys():
        yield Finding((), f"the feature {package} has no module of {', '.join(HOOKS)}", remedy_for(package))
    for name in sorted(vars(own).keys() & {*OF_PACKAGES, *ONLY_BUILTIN}):
        problem = f"{package}: {name} is read of built-in features alone"
        remedy = ONLY_BUILTIN.get(name) or (
            f"add entry points of the group {resolve(OF_PACKAGES[name]).entry_point_group} to its pyproject.toml"
        )
        yield Finding((), problem, remedy)


def _assigned(module: str) -> set[str]:
    """Returns the names that the file of a module assigns at its top level; none of one without a text."""
    spec = importlib.util.find_spec(module)
    try:
        tree = ast.parse(Path((spec and spec.origin) or "").read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it raises the same error, or it is compiled
        return set()
    plain = (target for each in tree.body if isinstance(each, ast.Assign) for target in each.targets)
    annotated = (each.target for each in tree.body if isinstance(each, ast.AnnAssign))
    return {each.id for each in (*plain, *annotated) if isinstance(each, ast.Name)}
