"""The store of measurements: what trials and running segments have measured, by the fingerprint of an option."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, from_json, to_json
from ringmaster.features import current_module
from ringmaster.registry import source_files
from ringmaster.tasks.profiling.search import OUT_OF_MEMORY, ProfilingFailure, Result
from ringmaster.techniques import Profile, registry
from ringmaster.techniques.data_source import LANGUAGE_MODELING, installed_source
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.loss import functions_of, loss_code_path, writes
from ringmaster.techniques.metric import installed_metric
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.profiles import ProfileKey

DATA_SHAPE = ("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels")
LIBRARIES = ("torch", "transformers")
# A fact that release 0.1 recorded, with the value of almost all models: profiles that it measured stay valid.
OF_0_1 = {"has_batch_statistics": False}
OF_OTHER_MODELS = frozenset(
    f"adaptation.{name}"
    for name in ("teacher", "temperature", "weight", "sparsity", "parents", "weights", "composition")
)
"""The fields of an adaptation that cost no time; the model and data of a composition are the job's own."""
COUNTED_SINCE_0_1 = frozenset(
    {
        *("model", "adapter", "loss", "precision", "communication", "compile", "clip_grad_norm", "global_batch_size"),
        *("exact", "freeze", "optimizer.name", "evaluation.metrics"),
        *("evaluation.max_batches", "evaluation.max_rows"),
        *("adaptation.kind", "adaptation.method", "adaptation.teacher_model", "data.kwargs", "data.factory"),
    }
)
"""The fields that `speed_key` counts in the form of release 0.1, so that its profiles stay valid."""
NUMBERS = frozenset(
    {
        *("betas", "eps", "weight_decay", "momentum", "dampening", "beta2_decay", "d"),
        *("adamw_betas", "adamw_eps", "adamw_lr", "adamw_weight_decay"),
        *("beta", "gamma", "label_smoothing", "temperature", "class_weights"),
    }
)
"""The options of optimizers and losses whose values cost the same time, unless they are 0."""
LENGTHS_AN_OCTAVE = 4  # lengths of samples that differ by less than a fifth count as equal
TRIALS_VERSION = 2  # the version of the measurement, incremented when new profiles are not comparable with old ones

TRIAL_STEPS = 12  # the steps of a trial whose profile does not contain their number
MAX_STEPS = 200  # for which older measurements count: a machine may change


def speed_key(
    job: Job,
    data: Mapping[str, Any],
    *,
    facts: ModelFacts | None = None,
    import_paths: tuple[str, ...] = (),
) -> str:
    """Returns a key that is equal for jobs that cannot differ in speed.

    All of the job counts that has an effect on the time of a step, but `NUMBERS` other than 0.

    data: the JSON form of the prepared data (its kind and shapes).
    facts: of the model, which distinguish two models that were saved under one name.
    import_paths: the folders of users' factories, whose source code is part of the key.
    """
    spec = job.data
    data_shape = {key: data[key] for key in DATA_SHAPE}
    if data.get("tensors"):  # no key without, so that earlier profiles stay valid
        data_shape["tensors"] = data["tensors"]
    if lengths := _lengths(data):
        data_shape["lengths"] = lengths
    code = [job.model.factory, loss_code_path(job.loss), spec.factory, installed_source(spec)]
    called = functions_of(job.loss, job.loss_options)
    factories = [name for name in (*code, *map(installed_metric, job.evaluation.metrics), *called) if name]
    # Data beyond what one evaluation reads does not change the speed: tomorrow's data needs no new profile.
    num_evaluated = min(data["num_held_out"], job.max_evaluated_rows)
    return digest(
        {
            "model": to_json(job.model),
            "facts": {} if facts is None else {**OF_0_1, **to_json(facts)},
            "adapter": to_json(job.adapter),
            "data": {**data_shape, "kwargs": to_json(spec.kwargs)},
            "loss": job.loss,
            "precision": [job.precision, job.communication, job.compile],
            "optimizer": [job.optimizer.name, sorted(job.optimizer.options)],
            "clips": job.clip_grad_norm is not None,
            "global_batch_size": job.global_batch_size,
            "exact": job.exact,  # decides which configs exist
            "evaluation": [list(job.evaluation.metrics), num_evaluated],
            "sources": {name: source_digest(name, import_paths) for name in factories} | _scripts(job.model.command),
            # Lengths and numbers of what the model writes.
            **({"generation": dict(job.loss_options)} if writes(job.loss, job.loss_options) else {}),
            **({"freeze": list(job.freeze)} if job.freeze else {}),
            **_adaptation(job),  # no key without an adaptation, so that earlier profiles stay valid
            **({"others": others} if (others := _others(job)) else {}),
        }
    )


def _others(job: Job) -> dict[str, Any]:
    """Returns the fields that cost time, differ from their defaults, and were not counted in release 0.1."""
    spec = job.optimizer
    optimizer = replace(
        spec,
        # The names of all options are counted already.
        options={name: value for name, value in spec.options.items() if name not in NUMBERS or not value},
        layer_decay=spec.layer_decay and 1.0,
        groups=tuple(replace(group, lr=None) for group in spec.groups),
    )
    options = {name: bool(value) if name in NUMBERS else value for name, value in job.loss_options.items()}
    kind = None if job.data.kind == LANGUAGE_MODELING else job.data.kind  # the kind of a text that names none
    job = replace(job, optimizer=optimizer, loss_options=options, data=replace(job.data, kind=kind))
    others = job.fields_with(Effect.TIME, but=COUNTED_SINCE_0_1 | OF_OTHER_MODELS)
    return {name: value for name, value in others.items() if value != {} or name not in ("data", "adaptation")}


def _lengths(data: Mapping[str, Any]) -> Any:
    """Returns a key of the lengths of samples that are padded to the longest of a step; None for equally long ones.

    Data of tomorrow that are about as long as those of today need no new profile.
    """
    if not data.get("tensors") or data["seq_len"] is None:
        return None
    if known := data.get("lengths"):
        return [round(LENGTHS_AN_OCTAVE * math.log2(max(length, 1))) for length in known]
    return data.get("digest")  # prepared by an earlier release, or by a factory


def fingerprint(
    key: str,
    *,
    technique: str,
    config: Mapping[str, Any],
    num_devices: int,
    device_kind: str,
    memory_bytes: int = 0,
    code: str = "",
) -> str:
    """Returns the name under which a profile is stored.

    It covers everything that matters, including library versions and the kind of device.

    memory_bytes: the memory of a device, as a config that ran out of memory may fit into more memory.
    code: the digest of a user's own technique.
    """
    device = [device_kind, round(memory_bytes / 2**30)]
    return digest([key, technique, code, dict(config), num_devices, device, _versions(), TRIALS_VERSION], length=32)


@cache
def _versions() -> dict[str, str]:
    """Returns the versions of the libraries; cached, as it parses a file for each and every config needs it."""
    return {library: version(library) for library in LIBRARIES}


def technique_code(name: str, import_paths: tuple[str, ...]) -> str:
    """Returns the digest of a user's technique module; empty for built-in techniques, which the release covers."""
    return "" if name in registry.BUILTIN else source_digest(registry.dotted_path(name), import_paths)


def _adaptation(job: Job) -> dict[str, Any]:
    """Returns the parts of an adaptation that affect the speed: its kind and method, teacher, and number of parents."""
    adaptation = job.adaptation
    if adaptation is None:
        return {}
    how = {"kind": adaptation.kind, "method": adaptation.method, "trains": job.trains, "num_parents": len(job.parents)}
    return {"adaptation": {**how, "teacher": to_json(adaptation.teacher_model)}}


def _scripts(command: Sequence[str] | None) -> dict[str, str]:
    """Returns the digest of each file that a command names: another training script has another speed."""
    files = [word for word in command or () if Path(word).is_file()]
    return {word: digest(Path(word).read_text(errors="replace")) for word in files}


def source_digest(dotted: str, import_paths: tuple[str, ...]) -> str:
    """Returns the digest of the module that holds a user's factory, without importing it; "" if it is not found.

    Modules of the same project that it imports are part of it, see `registry.source_files`.
    """
    module = current_module(dotted.partition(":")[0])
    top, *rest = module.split(".")
    spec = find_spec(top) or PathFinder.find_spec(top, import_paths)
    for part in rest:
        # The last part of the name alone: a dotted name would need parent packages that are not imported.
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return digest("".join(each.read_text(errors="replace") for each in source_files(Path(spec.origin), module=module)))


@dataclass(frozen=True, kw_only=True)
class ProfileStore:
    """Stored measurements, in the JSON forms of Profile and Failure.

    find: returns the stored measurements among some fingerprints.
    keep: stores a measurement under its fingerprint.
    newest: returns the profiles that were stored last, of any jobs.

    Profiles are stored with the load of the machine at which they were measured. What the methods return is as on a
    quiet machine. What a newer release has stored, and this one cannot read, is not known.
    """

    find: Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    keep: Callable[[str, Mapping[str, Any]], object] = lambda *_: None
    newest: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()

    def results(self, fingerprints: Sequence[str]) -> dict[str, Result]:
        """Returns the known measurements, by fingerprint."""
        read = ((name, _result(data)) for name, data in self.find(fingerprints).items())
        return {name: result for name, result in read if result is not None}

    def newest_profiles(self) -> list[Profile]:
        """Returns the profiles that were stored last, of any jobs, the newest first; the newest one of each option.

        An option is stored several times while a batch runs, each time with all of its steps so far.
        """
        profiles: dict[ProfileKey | int, Profile] = {}
        for number, result in enumerate(map(_result, self.newest())):
            if isinstance(result, Profile):
                profiles.setdefault(result.key or number, result)
        return list(profiles.values())

    def add(self, fingerprint: str, result: Result) -> None:
        """Stores a measurement for later runs: a profile and what is known of its option, or a lack of memory."""
        if isinstance(result, ProfilingFailure):
            if result.kind == OUT_OF_MEMORY:
                self.keep(fingerprint, to_json(result))
            return
        known = self.results([fingerprint]).get(fingerprint)
        self.keep(fingerprint, to_json(combined(known, result) if isinstance(known, Profile) else result))


class MeasuredOptions:
    """What the segments of a batch measure, on its way into the store.

    Jobs of one speed measure the same option: it is stored at first, and then once its steps have doubled.
    """

    def __init__(self, store: ProfileStore) -> None:
        self._store = store
        self._taken: set[int] = set()
        self._waiting: dict[str, Profile] = {}
        self._num_stored: dict[str, int] = {}

    def add(self, profile: Profile, *, number: int) -> None:
        """Takes what the segment with a number has measured; once, if it is called again after the store failed."""
        if number not in self._taken and profile.key is not None and profile.num_measured_steps:
            name = profile.key.fingerprint
            known = self._waiting.get(name)
            self._waiting[name] = profile if known is None else combined(known, profile)
        self._taken.add(number)
        self._keep(n for n, p in self._waiting.items() if p.num_measured_steps >= self._num_stored.get(n, 0))

    def add_unfit(self, profile: Profile, *, message: str) -> None:
        """Takes an option that has run out of memory, which is not tried again."""
        if profile.key is not None:
            self._store.add(profile.key.fingerprint, ProfilingFailure(kind=OUT_OF_MEMORY, message=message))

    def close(self) -> None:
        """Stores what waits."""
        self._keep(self._waiting)

    def _keep(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._store.add(name, self._waiting[name])
            num_steps = self._waiting.pop(name).num_measured_steps
            self._num_stored[name] = self._num_stored.get(name, 0) + num_steps


def combined(old: Profile, new: Profile) -> Profile:
    """Returns a newer profile of an option whose step time is the mean of both, by the numbers of their steps."""
    num_old = min(old.num_measured_steps or TRIAL_STEPS, MAX_STEPS)
    num_new = new.num_measured_steps or TRIAL_STEPS
    share = num_new / (num_old + num_new)
    quiet = new.under_load(1.0)
    ratio = (old.under_load(1.0).step_s / quiet.step_s) ** (1 - share) if min(old.step_s, quiet.step_s) > 0 else 1.0
    spread = math.hypot(share * new.spread, (1 - share) * old.spread)
    return replace(quiet.at_pace(ratio), num_measured_steps=num_old + num_new, spread=spread).under_load(new.load)


def _result(data: Mapping[str, Any]) -> Result | None:
    try:
        return from_json(ProfilingFailure, data) if "kind" in data else from_json(Profile, data).under_load(1.0)
    except ValueError:  # of another release, which shares the records
        return None
