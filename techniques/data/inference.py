"""The kind of data that fits the columns of files and the model, where they leave no doubt."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.features import listed
from ringmaster.techniques.data.image_processors import has_processor, normalisation_of
from ringmaster.techniques.data.row_source import RowSource, columns_of_files
from ringmaster.techniques.data.sources.image_classification import HOW, ImageOptions, images_of
from ringmaster.techniques.data.tokens import LABEL_COLUMNS, TextOptions, tokenized_source
from ringmaster.techniques.data_source import ALIASES, LANGUAGE_MODELING, data_source_named, data_source_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.loss import loss_class
from ringmaster.techniques.model_facts import CAUSAL_SUFFIXES
from ringmaster.techniques.models.model_folders import LOSS, read_json

KINDS: Mapping[str, tuple[str, ...]] = {
    "completion": CAUSAL_SUFFIXES,
    "text-classification": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "seq2seq": ("ForConditionalGeneration", "MTModel"),
    "image-classification": ("ForImageClassification",),
}
"""The kinds that are inferred after chats and those of features, and the endings of the classes of models."""

CLASSIFIERS = (*KINDS["text-classification"], *KINDS["token-classification"], *KINDS["image-classification"])
CLASSIFICATION = ("text-classification", "token-classification", "image-classification")
"""The kinds whose samples have classes."""


def infer_kind(spec: DataSpec, model: ModelSpec) -> str | None:
    """Returns the kind of data of files, or of a saved data set, whose spec names none; None where it stays open.

    Only the first row of the first file is read, and the names of a data set's columns. Data sets of images or of token
    ids, and those of the hub, stay as they are. A language model whose rows have text, or tokens, is trained on these.
    Where the model's class is unknown, only columns that no other kind has are decisive.

    Raises ValueError where files cannot be read.
    """
    if spec.kind is not None:
        return None
    if spec.path is None:
        there = () if spec.dataset is None else columns_of_saved(spec)
        if "input_ids" in there:
            is_read = spec.seq_len is not None or not {*LABEL_COLUMNS}.difference({"labels"}).isdisjoint(there)
            return _tokenized(spec, there) if is_read else None
        result = _fitting(spec, model, there) if there else None
        return None if result == "image-classification" else result
    if spec.path.endswith(".txt"):
        return None
    if images_of(spec) is not None:
        return "image-classification"
    if not (suited := _suited(model)):
        return None
    there = columns_of_files(spec, kind="language-modeling")
    if (tokenized := _tokenized(spec, there)) is not None:
        return tokenized
    if (architecture := architecture_of(model)) is not None and architecture.endswith(CLASSIFIERS):
        # Also where a column is missing, which its preparation then says.
        return _fitting(spec, model, there) or next(kind for kind in suited if kind in KINDS)
    return _fitting(spec, model, there)


def _tokenized(spec: DataSpec, there: tuple[str, ...]) -> str | None:
    """The kind of rows of token ids with labels, if they are."""
    source = tokenized_source(spec, there)
    return None if source is None else str(source.name)


def columns_of_saved(spec: DataSpec) -> tuple[str, ...]:
    """Returns the columns of the training split that `save_to_disk` wrote into a folder; () where they are unknown.

    The file of the columns is read without `datasets`, whose import takes seconds.
    """
    folder = Path(spec.dataset or "")
    for file in (folder / "dataset_info.json", folder / spec.split / "dataset_info.json"):
        if features := read_json(file).get("features"):
            return tuple(features)
    return ()


def inferred_kinds() -> dict[str, tuple[str, ...]]:
    """Returns the kinds that are inferred, with the endings of the classes of models that they suit.

    Of kinds that suit a model, the most specific ones come first.
    """
    return {"chat": CAUSAL_SUFFIXES, **dict(listed("job", "INFERRED_KINDS")), **KINDS}


def _suited(model: ModelSpec) -> list[str]:
    """The kinds that suit a model's class, the most specific first."""
    if (architecture := architecture_of(model)) is None:
        return list(inferred_kinds())
    fits = {kind: [each for each in ends if architecture.endswith(each)] for kind, ends in inferred_kinds().items()}
    return sorted((kind for kind in fits if fits[kind]), key=lambda kind: -max(map(len, fits[kind])))


def _fitting(spec: DataSpec, model: ModelSpec, there: tuple[str, ...]) -> str | None:
    """The kind that suits a model and has its columns among those that are there."""
    suited, architecture = _suited(model), architecture_of(model)
    is_text = not {spec.options.get("text_column", TextOptions.text_column), "input_ids"}.isdisjoint(there)
    if is_text and (architecture is None or architecture.endswith(CAUSAL_SUFFIXES)):
        return None
    fitting = [kind for kind in suited if _has_columns(kind, spec, there)]
    if architecture is None:
        fitting = [kind for kind in fitting if data_source_named(kind).has_own_columns]
    return fitting[0] if fitting else None


def architecture_of(model: ModelSpec) -> str | None:
    """Returns the class of a model, as far as it is known without a network."""
    if model.architecture is not None:
        return model.architecture
    architectures = model.config.get("architectures")
    if architectures is None and model.from_pretrained is not None:
        architectures = read_json(Path(model.from_pretrained) / "config.json").get("architectures")
    return str(architectures[0]) if isinstance(architectures, (list, tuple)) and architectures else None


def with_options_of_data(job: Job, *, saved: Mapping[str, Any] | None = None) -> Job:
    """Returns the job with the options of its loss that its data determines, unless it gives them.

    What cannot be read is reported when the data is prepared.

    saved: options that count where neither the job nor its data says more.
    """
    of_data: Mapping[str, Any] = {}
    with suppress(ValueError):
        of_data = {} if (loss := loss_class(job.loss)) is None else loss.options_of_data(job.data)
    further = {**(saved or {}), **of_data, **job.loss_options}
    absent = {key for key in of_data if further[key] is None}
    return replace(job, loss_options={key: value for key, value in further.items() if key not in absent})


def with_loss_of(job: Job, *folders: Path) -> Job:
    """Returns a job of an evaluation with the loss of the first model that has one, where the job names none.

    The output of a model means what its loss makes of it, such as similarities of texts. Data of
    another kind than the model was trained on does not suit its loss, and is read by the usual loss of its kind, or
    by the model's own.

    folders: of models, as they were exported.
    """
    if job.loss is not None:
        return job
    source = data_source_of(job.data)
    saved = next((content for each in folders if (content := read_json(each / LOSS))), {})
    if not saved or saved["kind"] != source.name:
        return job if source.usual_loss is None else with_options_of_data(replace(job, loss=source.usual_loss))
    return with_options_of_data(replace(job, loss=saved["loss"]), saved=saved["loss_options"])


def with_processor_of(spec: DataSpec, model: ModelSpec) -> DataSpec:
    """Returns a spec whose images are read as a model takes them, unless it says how.

    They are read by the image processor of a pretrained model, or else in the size of the model's config; and as grey
    ones where the model has one channel. Where an option says a part of how they are read, such as their size alone,
    a pretrained model's processor says the mean and std that none gives.
    """
    if spec.kind != "image-classification":
        return spec
    given, config, kwargs = {*spec.kwargs, *spec.options}, _vision_config(model), dict[str, Any]()
    if model.from_pretrained is not None and HOW.isdisjoint(given) and has_processor(model.from_pretrained):
        kwargs["processor"] = model.from_pretrained
    elif given.isdisjoint({"image_size", "processor"}):
        size = config.get("image_size")
        if isinstance(size, (list, tuple)) and len(set(size)) == 1:
            size = size[0]
        if isinstance(size, int) and size != ImageOptions.image_size:
            kwargs["image_size"] = size
    if not HOW.isdisjoint(given) and model.from_pretrained is not None and "processor" not in given:
        kwargs |= _normalisation(model.from_pretrained, given)
    if config.get("num_channels") == 1 and "mode" not in given:
        kwargs["mode"] = "L"
    return replace(spec, kwargs={**spec.kwargs, **kwargs}) if kwargs else spec


def _normalisation(name: str, given: Collection[str]) -> dict[str, Any]:
    """The mean and std of a model's processor that options neither give nor have by default.

    A processor that cannot be read is named in addition to the options, which the check of the data then refuses.
    """
    missing = {"mean": ImageOptions.mean, "std": ImageOptions.std}
    missing = {key: usual for key, usual in missing.items() if key not in given}
    if not missing or not has_processor(name):
        return {}
    try:
        own = normalisation_of(name)
    except ValueError:
        return {"processor": name}
    return {key: own[key] for key, usual in missing.items() if {*_listed(own[key])} != {usual}}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _vision_config(model: ModelSpec) -> Mapping[str, Any]:
    """What is known of a model's config without a network; of the part for images, where it is a part."""
    folder = None if model.from_pretrained is None else Path(model.from_pretrained)
    of_base = {} if folder is None else read_json(folder / "config.json")
    parts = (of_base, of_base.get("vision_config"), model.config, model.config.get("vision_config"))
    return {name: value for part in parts if isinstance(part, Mapping) for name, value in part.items()}


def classes_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of the classes of the model in a folder; () where it does not name them."""
    names = read_json(folder / "config.json").get("id2label") or {}
    result = tuple(str(names[number]) for number in sorted(names, key=int))
    return () if all(name.startswith("LABEL_") for name in result) else result


def encodes_text(spec: DataSpec) -> bool:
    """Returns whether the samples of a spec are made of text by a tokenizer. Raises ValueError on an unknown kind.

    True also for a Hugging Face data set of unknown kind: whether it has text is known once it is loaded.
    """
    if spec.kind is None or spec.kind in (*ALIASES, LANGUAGE_MODELING):
        return spec.path is not None or spec.dataset is not None or spec.source == "python-stdlib"
    source = data_source_named(spec.kind)
    return isinstance(source, RowSource) and source.needs_tokenizer


def _has_columns(kind: str, spec: DataSpec, there: tuple[str, ...]) -> bool:
    source = data_source_named(kind)
    assert isinstance(source, RowSource)
    try:
        source.columns(spec, there)
    except ValueError:
        return False
    return True
