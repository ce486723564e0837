"""Ludwig configurations as jobs: features of several types, the concat combiner, and the trainer of `ecd` models.

What is not taken is refused, all of it at once, with its path in the configuration. Source: Ludwig's reference of
configurations (https://ludwig.ai/latest/configuration/).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster.features.ludwig.job import LudwigKey
from ringmaster.files import path_in, text_of
from ringmaster.findings import Finding, Location, as_list, as_mapping, got
from ringmaster.tasks.batch import document
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.techniques.loss import Values, WholeNumbers, YesOrNo

FACTORY = "ringmaster.techniques.models.feature_model:build_feature_model"
"""The name of the model in jobs and in exported models of all releases: see `FORMER_MODULES` of this package."""
TRANSFORMERS = ("albert", "bert", "electra", "roberta", "vit")
(KEY,) = LudwigKey.job_keys()

Keys = Mapping[str, Values]


class Names(Values):
    """Any text."""

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is a text."""
        return isinstance(value, str) and bool(value)

    def __str__(self) -> str:
        return "a text"


WHOLE, POSITIVE, SHARE = WholeNumbers(least=1), Values(above=0), Values(least=0, below=1)
LAYERS: Keys = {
    "num_fc_layers": WholeNumbers(least=0), "output_size": WHOLE, "dropout": SHARE,
    "activation": Values(among=("relu", "tanh", "gelu", "sigmoid")),
}  # fmt: skip
_TRANSFORMER: Keys = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), WHOLE
) | {"use_pretrained": YesOrNo()}
_SCALAR: Mapping[str, Keys] = {"passthrough": {}, "dense": LAYERS}
ENCODERS: Mapping[str, Mapping[str, Keys]] = {
    "number": _SCALAR,
    "binary": _SCALAR,
    "category": {"dense": {"embedding_size": WHOLE}, "onehot": {}},
    "text": {
        "parallel_cnn": {"embedding_size": WHOLE, "num_filters": WHOLE, **LAYERS},
        "embed": {"embedding_size": WHOLE},
        **dict.fromkeys(TRANSFORMERS[:-1], _TRANSFORMER),
    },
    "image": {"stacked_cnn": {"num_filters": WHOLE, **LAYERS}, "vit": {**_TRANSFORMER, "patch_size": WHOLE}},
}
"""The encoders that are taken, by the type of the feature, the default first, with their options."""
PREPROCESSING: Mapping[str, Keys] = {
    "number": {"normalization": Values(among=("zscore", "minmax"))},
    "text": {"max_sequence_length": WholeNumbers(least=2)},
    "image": {"height": WHOLE, "width": WHOLE},
}
LOSSES = {
    "category": "softmax_cross_entropy",
    "binary": "binary_weighted_cross_entropy",
    "number": "mean_squared_error",
}
METRICS = {"category": "accuracy", "binary": "accuracy", "number": "mae"}
TRAINER: Keys = {
    "learning_rate": POSITIVE, "batch_size": WHOLE, "epochs": WHOLE, "train_steps": WHOLE,
    "type": Values(among=("trainer",)),
}  # fmt: skip
OPTIMIZERS: Mapping[str, Keys] = {
    "adam": {"betas": Values(is_list=True, least=0, below=1), "eps": POSITIVE},
    "adamw": {"betas": Values(is_list=True, least=0, below=1), "eps": POSITIVE, "weight_decay": SHARE},
    "sgd": {"momentum": SHARE, "weight_decay": SHARE, "nesterov": YesOrNo()},
}
CLIPPED_NORM = 0.5
"""Ludwig's default of `trainer.gradient_clipping.clipglobalnorm`."""


class LudwigFiles(BatchFileHook):
    """Entries of jobs, or whole files, that are Ludwig configurations."""

    file_key = KEY

    def expanded(self, entry: Any, *, folder: Path) -> tuple[Any, Sequence[Finding]]:
        """Returns the entry of a job with the keys from its Ludwig configuration; others unchanged.

        The configuration is the value of its key, or lies in a file, whose name is relative to `folder`. The entry's
        own keys win, also those of `data`.
        """
        if not isinstance(entry, Mapping) or KEY not in entry:
            return entry, ()
        own = {key: value for key, value in entry.items() if key != KEY}
        configuration, faults, read = entry[KEY], list[Finding](), document.YamlDocument()
        if isinstance(configuration, str):
            try:
                read = document.read(text_of(path_in(folder, configuration)))
                configuration, faults = read.data, read.findings
            except (OSError, ValueError) as error:
                faults = [Finding((), f"cannot be read: {error}", "name a Ludwig configuration")]
        if not faults and not isinstance(configuration, Mapping):
            faults = [Finding((), f"is not a Ludwig configuration, {got(configuration)}", "give its input_features")]
        faults += list(_faults(configuration)) if not faults else []
        findings = []
        for each in faults:
            line = read.line(each.place)
            where = f" ({entry[KEY]}:{line})" if line is not None else ""
            findings.append(Finding((KEY, *each.place), each.message + where, each.remedy))
        if faults:  # what the configuration leaves out would be reported as missing
            return {**_UNREAD, **own}, findings
        result = _job(configuration)
        data = {**result["data"], **as_mapping(own.get("data"))}
        return {**result, **own, "data": data}, ()


BATCH_FILE_HOOKS = (LudwigFiles(),)

_UNREAD: Mapping[str, Any] = {"model": {"factory": FACTORY}, "data": {"source": "digits"}, "num_steps": 1}


def _faults(raw: Mapping[str, Any]) -> Iterator[Finding]:
    sections = ("input_features", "output_features", "combiner", "trainer", "preprocessing")
    yield from _options(raw, {"model_type": Values(among=("ecd",))}, (), more=sections)
    names = list[Any]()
    for key in ("input_features", "output_features"):
        if not as_list(raw.get(key)):
            yield Finding((key,), f"must be a list of features, {got(raw.get(key))}", "list at least one")
        for i, feature in enumerate(as_list(raw.get(key))):
            yield from _feature_faults(feature, (key, i), is_output=key == "output_features")
            names.append(as_mapping(feature).get("name"))
    if doubled := {str(name) for name in names if names.count(name) > 1}:
        yield Finding(("input_features",), f"have the name {', '.join(sorted(doubled))} twice", "rename one")
    yield from _typed(raw.get("combiner"), {"concat": LAYERS}, ("combiner",))
    trainer, preprocessing = as_mapping(raw.get("trainer")), as_mapping(raw.get("preprocessing"))
    yield from _options(raw.get("trainer"), TRAINER, ("trainer",), more=("optimizer", "gradient_clipping"))
    yield from _typed(trainer.get("optimizer"), OPTIMIZERS, ("trainer", "optimizer"))
    clipped: Keys = {"clipglobalnorm": POSITIVE}
    yield from _options(trainer.get("gradient_clipping"), clipped, ("trainer", "gradient_clipping"))
    yield from _options(raw.get("preprocessing"), {}, ("preprocessing",), more=("split",))
    shares: Keys = {"probabilities": Values(is_list=True, above=0, below=1)}
    yield from _typed(preprocessing.get("split"), {"random": shares}, ("preprocessing", "split"))


def _feature_faults(feature: Any, place: Location, *, is_output: bool) -> Iterator[Finding]:
    known, kind = LOSSES if is_output else ENCODERS, as_mapping(feature).get("type")
    sections = ("decoder", "loss") if is_output else ("encoder",)
    if not isinstance(feature, Mapping):
        yield Finding(place, f"must be a mapping, {got(feature)}", "give its name and type")
        return
    if not feature.get("name"):
        yield Finding((*place, "name"), "is missing", "name the column")
    if not isinstance(kind, str) or kind not in known:
        yield Finding((*place, "type"), f"is not taken, {got(kind)}", f"taken are {', '.join(known)}")
        return
    texts: Keys = {"name": Names(), "column": Names()}
    yield from _options(feature, texts, place, more=("type", "preprocessing", *sections))
    yield from _options(feature.get("preprocessing"), PREPROCESSING.get(kind, {}), (*place, "preprocessing"))
    pixels = as_mapping(feature.get("preprocessing"))
    if pixels.get("height") != pixels.get("width"):
        yield Finding((*place, "preprocessing"), "has a height that is not its width", "give both one number")
    if not is_output:
        yield from _typed(feature.get("encoder"), ENCODERS[kind], (*place, "encoder"))
        encoder = as_mapping(feature.get("encoder"))
        if encoder.get("type") in TRANSFORMERS and encoder.get("use_pretrained", True):
            yield Finding((*place, "encoder"), "would be pretrained, which is not taken", "set use_pretrained to false")
        return
    decoder = {"classifier" if kind == "category" else "regressor": LAYERS}
    yield from _typed(feature.get("decoder"), decoder, (*place, "decoder"))
    yield from _typed(feature.get("loss"), {LOSSES[kind]: {"weight": Values(least=0)}}, (*place, "loss"))


def _typed(section: Any, known: Mapping[str, Keys], place: Location) -> Iterator[Finding]:
    """Yields the faults of a section that has a `type`, by default the first."""
    kind = as_mapping(section).get("type", next(iter(known)))
    if not isinstance(kind, str) or kind not in known:
        yield Finding((*place, "type"), f"is not taken, {got(kind)}", f"taken are {', '.join(known)}")
        return
    yield from _options(section, known[kind], place, more=("type",))


def _options(section: Any, known: Keys, place: Location, *, more: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Yields the unknown keys of a section, and the values that are not allowed. more: keys that are checked apart."""
    if section is not None and not isinstance(section, Mapping):
        yield Finding(place, f"must be a mapping, {got(section)}", "give its keys")
    for key, value in as_mapping(section).items():
        if key in known and not known[key].allow(value):
            yield Finding((*place, key), f"is not taken, {got(value)}", f"give {known[key]}")
        elif key not in (*known, *more):
            listed = f"; taken here are {', '.join((*known, *more))}" if (known or more) else ""
            yield Finding((*place, str(key)), "is not taken from Ludwig configurations", f"remove it{listed}")


def _job(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a job of a configuration without faults."""
    trainer, features, options, outputs = as_mapping(raw.get("trainer")), [], {}, raw["output_features"]
    data: dict[str, Any] = {"kind": "features"}
    for each in (*raw["input_features"], *outputs):
        how = dict(each.get("preprocessing", {}))
        if "max_sequence_length" in how:
            data["seq_len"] = max(data.get("seq_len", 0), how.pop("max_sequence_length"))
        feature = {key: each[key] for key in ("name", "type", "column") if key in each} | (
            {"size": how["height"]} if "height" in how else how
        )
        features.append({**feature, "is_output": True} if each in outputs else feature)
        options[each["name"]] = dict(each.get("encoder") or each.get("decoder") or {})
    data["kwargs"] = {"features": features}
    if shares := as_mapping(as_mapping(raw.get("preprocessing")).get("split")).get("probabilities"):
        data["held_out"] = 1 - shares[0]
    optimizer = {**as_mapping(trainer.get("optimizer"))}
    kind = optimizer.pop("type", "adam")
    clipped = as_mapping(trainer.get("gradient_clipping")).get("clipglobalnorm", CLIPPED_NORM)
    length = {"num_steps": trainer["train_steps"]} if "train_steps" in trainer else {
        "num_epochs": trainer.get("epochs", 100)
    }  # fmt: skip
    return {
        "model": {"factory": FACTORY, "kwargs": {"options": options, "combiner": dict(raw.get("combiner", {}))}},
        "data": data,
        "loss": {"name": "weighted-outputs", "weights": [each.get("loss", {}).get("weight", 1.0) for each in outputs]},
        "optimizer": {
            "name": "adamw" if kind == "adam" else kind,
            "lr": trainer.get("learning_rate", 0.001),
            "options": optimizer | ({"weight_decay": 0.0} if kind == "adam" else {}),
        },
        "clip_grad_norm": clipped,
        "global_batch_size": trainer.get("batch_size", 128),
        "evaluation": {"metrics": ["loss", METRICS[outputs[0]["type"]]]},
        **length,
    }
