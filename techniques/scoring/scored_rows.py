"""The order of a scoring worker, and the rows that models are scored on: opened once for all models, read in chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmaster.codec import from_json
from ringmaster.registry import resolve
from ringmaster.techniques.data.row_files import has_tokenizer, has_vocabulary
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.models.model_folders import model_of_folder
from ringmaster.techniques.models.peft_format import base_changes_of, base_name, base_of, is_adapter, read_adapter
from ringmaster.techniques.processes.order import Slot

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ringmaster.techniques.data import PreparedData


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data that a model is trained on. prepared: the JSON form of its `PreparedData`; empty to prepare it then."""

    spec: DataSpec
    prepared: Mapping[str, Any]

    def read_by(self, folder: Path) -> TrainingData:
        """Returns the data as the model in a folder reads it, to find the same rows among others that it reads."""
        return TrainingData(spec=read_by(self.spec, folder), prepared={})


@dataclass(frozen=True, kw_only=True)
class ScoringOrder:
    """Score `models` (folders by name) on the same rows; rank 0 writes the results into `folder`.

    job: the job whose loss, precision, metrics (beside the default ones) and held-out rows are used. The models' own
        specs are read from their folders.
    slots: the devices. Over several, each with a rank of its own, the models are divided by tensor parallelism.
    data: the JSON form of the `PreparedData` whose held-out rows are read. Without it (and without cases) the job's
        data is prepared, and read with the tokenizer of the first model if the job names none.
    cases: in place of data, a file of literal cases: JSON with "texts" (and "labels", one each), or an .npz of columns.
    encode: "package.module:function" that converts a list of texts to columns of tensors; else each model's tokenizer.
    slicers: dotted functions, by name, each from a row (a dict of tensors) to the name of its slice.
    keep_inputs: whether the file also contains the rows themselves.
    max_rows: the most rows; by default as many as the job's evaluation reads, or all of data that is scored as a whole.
    is_whole: whether all samples of the data are scored, those for training too: of data that nothing is trained on.
    trained_on: data whose samples for training are left out where they are among the samples to score.
    shares_batches: whether adapters of one base are scored in one batch; the scores are the same.
    import_paths: folders appended to the import path.
    rank: which of the ranks this is.
    """

    job: Job
    models: Mapping[str, str]
    slots: tuple[Slot, ...]
    cache_dir: str
    folder: str
    data: Mapping[str, Any] | None = None
    cases: str | None = None
    encode: str | None = None
    slicers: Mapping[str, str] = field(default_factory=dict)
    keep_inputs: bool = False
    max_rows: int | None = None
    is_whole: bool = False
    trained_on: TrainingData | None = None
    shares_batches: bool = True
    import_paths: tuple[str, ...] = ()
    rank: int = 0


def model_spec(folder: Path) -> ModelSpec:
    """The spec of the model in a folder that `export_model` or `save_pretrained` wrote.

    Raises ValueError if the folder holds no model.
    """
    if is_adapter(folder):
        base = base_of(folder)
        return model_spec(base) if base else ModelSpec(from_pretrained=base_name(folder))
    if (spec := model_of_folder(folder.absolute())) is not None:
        return spec
    raise ValueError(f"{folder} holds no model. To fix: give a folder that a job exported or `save_pretrained` wrote")


FILES = (
    *("tokenizer.json", "vocab.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)


def base_key(folder: Path) -> str | None:
    """A key that is equal for models that can be computed over one base; None for a model that must run alone.

    The key of an adapter is its base's folder or hub name; that of a full model is its own folder.
    """
    if not is_adapter(folder):
        return str(folder.resolve())
    try:
        adapter, base = read_adapter(folder), base_name(folder)
        if adapter.dora or adapter.kind == "prompt" or base_changes_of(folder):
            return None
    except (OSError, ValueError):  # reported when the model runs alone
        return None
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def tokenizer_of(folder: Path) -> str:
    """The folder or hub name of the tokenizer of the model in `folder`.

    An adapter without a tokenizer of its own uses its base's.
    """
    if not is_adapter(folder) or has_vocabulary(folder):
        return str(folder)
    try:
        return base_name(folder)
    except ValueError:  # reported when the weights are loaded
        return str(folder)


def tokenizer_digest(name: str) -> str:
    """A digest of the tokenizer files in a folder, equal for equal tokenizers; a hub name is returned unchanged."""
    folder, digest = Path(name), hashlib.sha256()
    if not folder.is_dir():
        return name
    for file in (folder / each for each in FILES):
        if file.is_file():
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def read_alike(spec: DataSpec, first: Path, other: Path) -> bool:
    """Returns whether two models in folders make the same samples of rows that name no tokenizer or image processor.

    They do not if each has one of its own, and these differ.
    """
    from ringmaster.techniques.data.image_processors import has_processor, settings_of
    from ringmaster.techniques.data.inference import encodes_text

    folders = (str(first), str(other))
    if spec.kind == "image-classification":
        return not all(map(has_processor, folders)) or settings_of(folders[0]) == settings_of(folders[1])
    if not encodes_text(spec):
        return True
    tokenizers = [tokenizer_of(folder.absolute()) for folder in (first, other)]
    have_files = all(has_tokenizer(Path(tokenizer)) for tokenizer in tokenizers)
    return not have_files or len({*map(tokenizer_digest, tokenizers)}) == 1


def read_by(spec: DataSpec, folder: Path) -> DataSpec:
    """Returns rows as the model in a folder reads them, by its own tokenizer or image processor."""
    from ringmaster.techniques.data.inference import encodes_text, with_processor_of
    from ringmaster.techniques.data.sources.image_classification import HOW

    if spec.kind == "image-classification":
        kwargs, options = ({k: v for k, v in each.items() if k not in HOW} for each in (spec.kwargs, spec.options))
        plain = replace(spec, kwargs=kwargs, options=options)
        return with_processor_of(plain, ModelSpec(from_pretrained=str(folder)))
    return replace(spec, tokenizer=tokenizer_of(folder.absolute())) if encodes_text(spec) else spec


# Limits of one forward pass.
MAX_ROWS = 64
MAX_TOKENS = 1 << 13
MAX_TOKENS_CPU = 1 << 10  # a fifth faster than eight times as many, which do not fit into a core's cache
MAX_LOGITS = 1 << 26  # so that a large vocabulary does not take all memory

Chunk = tuple[list[int], "dict[str, Tensor]"]
"""The numbers of some rows, and the batch of these rows."""


@dataclass(frozen=True, kw_only=True)
class LiteralTexts:
    """Literal cases as texts.

    texts: none where a model is measured on rows of its metrics alone (`ModelMetric`).
    labels: the label of each text, or None.
    encode: a dotted function that converts texts to columns of tensors; else each model's tokenizer is used.
    """

    texts: Sequence[str]
    labels: Sequence[int] | None = None
    encode: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredRows:
    """Held-out rows of `job`, or literal `cases` (texts, or columns of arrays) in their place.

    reader: the folder of a model whose tokenizer reads text if the job names none.
    data, slicers, keep_inputs, max_rows, is_whole, trained_on: as in `ScoringOrder`.
    """

    job: Job
    cache_dir: Path
    reader: Path
    data: Mapping[str, Any] | None = None
    cases: LiteralTexts | Mapping[str, Any] | None = None
    slicers: Mapping[str, str] = field(default_factory=dict)
    keep_inputs: bool = False
    max_rows: int | None = None
    is_whole: bool = False
    trained_on: TrainingData | None = None

    @cached_property
    def prepared(self) -> PreparedData:
        """The prepared data; for literal cases a placeholder with only a name."""
        from ringmaster.techniques.data import PreparedData, prepare

        if self.data is not None:
            return from_json(PreparedData, self.data)
        if self.cases is None:
            return prepare(self._spec, cache_dir=self.cache_dir)
        return PreparedData(name="cases", digest="", num_samples=0, num_held_out=0, kind="other", source="cases")

    def job_of(self, model_dir: Path) -> Job:
        """The job, with the loss of a model, or of the first model, where it names none. Literal cases need no loss."""
        from ringmaster.techniques.data.inference import with_loss_of

        return self.job if self.cases is not None else with_loss_of(self.job, model_dir, self.reader)

    @cached_property
    def num_rows(self) -> int:
        """The number of rows. Raises ValueError if there are no held-out rows."""
        if isinstance(self.cases, LiteralTexts):
            return len(self.cases.texts)
        if self.cases is not None:
            return len(next(iter(self.cases.values())))
        num_rows = sum(len(numbers) for _, numbers in self._parts)
        if num_rows == 0 and self.trained_on is not None:
            raise ValueError(
                "all rows to compare on are among those that are trained on, and prove nothing. To fix: name rows that "
                "no model is trained on"
            )
        if num_rows == 0:
            raise ValueError("there are no held-out rows. To fix: raise the data's held_out")
        return min(num_rows, self.limit or num_rows)

    @property
    def limit(self) -> int | None:
        """The most rows that are scored; None for all."""
        if self.max_rows is not None or self.is_whole:
            return self.max_rows
        return self.job.max_evaluated_rows

    def chunks(self, model_dir: Path, *, config: Any, shifted: bool, device: torch.device) -> Iterator[Chunk]:
        """Yields all rows in chunks on the device, tokenized as the model in `model_dir` requires.

        config: the model's config, if it has one.
        shifted: whether the model is a language model.
        """
        for numbers, batch in self._chunks(model_dir, config, shifted, device):
            yield numbers, {key: tensor.to(device) for key, tensor in batch.items()}

    def _chunks(self, model_dir: Path, config: Any, shifted: bool, device: torch.device) -> Iterator[Chunk]:
        if isinstance(self.cases, LiteralTexts):
            if self.cases.texts:
                yield from self._texts(self.cases, model_dir, config, shifted, device)
            return
        if self.cases is not None:
            yield from _columns(self.cases, config, device)
            return
        from ringmaster.techniques.data import fetch

        size = _chunk_size(self.prepared.seq_len or 1, config, device)
        before = 0  # the number of rows that were yielded
        for part, numbers in self._parts:
            wanted = numbers[: self.num_rows - before]
            for first in range(0, len(wanted), size):
                some = wanted[first : first + size]
                yield list(range(before, before + len(some))), fetch(part, some)
                before += len(some)

    def known(self, batch: Mapping[str, Tensor]) -> dict[str, list[Any]]:
        """The values of rows that need no model: token counts, integer columns, slices, and the rows themselves."""
        batch = {key: tensor.cpu() for key, tensor in batch.items()}
        num_rows = len(next(iter(batch.values())))
        result: dict[str, list[Any]] = {}
        if "attention_mask" in batch:
            result["num_tokens"] = batch["attention_mask"].flatten(1).sum(1).tolist()
        elif "input_ids" in batch:
            result["num_tokens"] = [batch["input_ids"][0].numel()] * num_rows
        for key, tensor in batch.items():
            if tensor.ndim == 1 and not tensor.is_floating_point():
                result[f"column.{key}"] = tensor.tolist()
            if self.keep_inputs:
                result[f"input.{key}"] = list(tensor.numpy())
        for name, dotted in self.slicers.items():
            slicer = resolve(dotted)
            rows = [{key: tensor[i] for key, tensor in batch.items()} for i in range(num_rows)]
            result[f"slice.{name}"] = [str(slicer(row)) for row in rows]
        return result

    def are_labelled(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether a loss of the batch's rows can be computed: always of held-out rows, of cases that have labels."""
        return self.cases is None or "labels" in batch

    @property
    def by_tokenizer(self) -> bool:
        """Whether each model reads the rows with its own tokenizer."""
        return isinstance(self.cases, LiteralTexts) and self.cases.encode is None

    @cached_property
    def _parts(self) -> list[tuple[Any, list[int]]]:
        """The data sets that are scored, each with the numbers of its samples: the held-out ones alone, or all."""
        from ringmaster.techniques.data import open_data

        training, held_out = open_data(self._spec, cache_dir=self.cache_dir, prepared=self.prepared)
        parts = (training, held_out) if self.is_whole else (held_out,)
        trained = set() if self.trained_on is None else self._trained(self.trained_on)
        return [
            (part, [number for number in range(len(part)) if not trained or _digest(part[number]) not in trained])
            for part in parts
        ]

    def _trained(self, data: TrainingData) -> set[bytes]:
        """The digests of the samples that are trained on."""
        from ringmaster.techniques.data import PreparedData, open_data

        prepared = from_json(PreparedData, data.prepared) if data.prepared else None
        training, _ = open_data(data.spec, cache_dir=self.cache_dir, prepared=prepared)
        return {_digest(training[number]) for number in range(len(training))}

    @property
    def _spec(self) -> DataSpec:
        """The job's data spec, with the reader's tokenizer if the job names none."""
        spec = self.job.data
        if self.data is not None or spec.tokenizer is not None or spec.factory is not None:
            return spec
        folder = Path(tokenizer_of(self.reader.absolute()))
        return replace(spec, tokenizer=str(folder)) if has_tokenizer(folder) else spec

    def _texts(
        self, cases: LiteralTexts, model_dir: Path, config: Any, shifted: bool, device: torch.device
    ) -> Iterator[Chunk]:
        """Yields chunks of texts of equal length, so that no padding is needed."""
        import torch

        texts, labels = list(cases.texts), cases.labels
        if cases.encode is not None:
            columns = {**resolve(cases.encode)(texts), **({} if labels is None else {"labels": torch.tensor(labels)})}
            yield from _columns(columns, config, device)
            return
        encoded = _tokenized(texts, tokenizer_of(model_dir), config=config, shifted=shifted)
        by_length = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
        # Classifiers without a padding token take one row at a time.
        alone = not shifted and getattr(config, "pad_token_id", None) is None
        while by_length:
            length = len(encoded[by_length[0]])
            size = 1 if alone else _chunk_size(length, config, device)
            numbers = [i for i in by_length[:size] if len(encoded[i]) == length]
            by_length = by_length[len(numbers) :]
            batch = {"input_ids": torch.tensor([encoded[i] for i in numbers])}
            if shifted:
                batch["labels"] = batch["input_ids"]
            elif labels is not None:
                batch["labels"] = torch.tensor([labels[i] for i in numbers])
            yield numbers, batch


def _digest(sample: Mapping[str, Tensor]) -> bytes:
    """A digest of what a model reads of a sample: neither its labels nor its padding."""
    result = hashlib.sha256()
    for key, tensor in sorted(sample.items()):
        if key.endswith(("labels", "attention_mask")):
            continue
        mask = sample.get(key.replace("input_ids", "attention_mask")) if "input_ids" in key else None
        value = tensor if mask is None or mask.shape != tensor.shape else tensor[mask.bool()]
        result.update(f"{key} {tuple(value.shape)} {value.dtype} ".encode())
        result.update(value.contiguous().numpy().tobytes())
    return result.digest()


def cases_in(file: Path, *, encode: str | None) -> LiteralTexts | Mapping[str, Any]:
    """The literal cases in a file of the format that `ScoringOrder` describes."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as columns:
            return {name: columns[name] for name in columns.files}
    content = json.loads(file.read_text(encoding="utf-8"))
    return LiteralTexts(texts=content["texts"], labels=content.get("labels"), encode=encode)


def _columns(columns: Mapping[str, Any], config: Any, device: torch.device) -> Iterator[Chunk]:
    import torch

    tensors = {name: torch.as_tensor(column) for name, column in columns.items()}
    num_rows = len(next(iter(tensors.values())))
    tokens = tensors.get("input_ids")
    size = _chunk_size(1 if tokens is None else tokens.shape[-1], config, device)
    for first in range(0, num_rows, size):
        numbers = list(range(first, min(first + size, num_rows)))
        batch = {name: column[first : first + size] for name, column in tensors.items()}
        yield numbers, {key: c.float() if c.dtype.is_floating_point else c.long() for key, c in batch.items()}


def _tokenized(texts: list[str], tokenizer_name: str, *, config: Any, shifted: bool) -> list[list[int]]:
    """The token ids of each text. For a language model the token that separates documents precedes them."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{tokenizer_name} has no tokenizer to read texts with. To fix: name a function by `encode` that makes "
            "them into tensors"
        ) from error
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not shifted, verbose=False)["input_ids"]
    if shifted:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [[*([] if start is None else [start]), *row] for row in ids]
    longest, limit = max(map(len, ids)), num_positions(config)
    if limit is not None and longest > limit:
        raise ValueError(f"a case has {longest} tokens, and the model reads {limit}. To fix: shorten it")
    if min(map(len, ids)) < (2 if shifted else 1):
        raise ValueError("a case has too few tokens to be measured. To fix: leave empty texts out")
    return ids


def max_tokens(device: torch.device) -> int:
    """The maximum number of tokens of one forward pass."""
    return MAX_TOKENS_CPU if device.type == "cpu" else MAX_TOKENS


def _chunk_size(num_tokens: int, config: Any, device: torch.device) -> int:
    num_tokens = max(num_tokens, 1)
    per_row = num_tokens * (getattr(config, "vocab_size", None) or 1)
    return max(1, min(MAX_ROWS, max_tokens(device) // num_tokens, MAX_LOGITS // per_row))
