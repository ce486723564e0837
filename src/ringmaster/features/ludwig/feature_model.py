"""Models of tables of features: an encoder for each input, a combiner of all, and a decoder for each output.

Source: Molino et al., Ludwig: a type-based declarative deep learning toolbox (arXiv:1909.07930). Encoders have Ludwig's
names and options.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ringmaster.features.ludwig.feature_rows import (
    Feature,
    FeatureRows,
    ValueEncoder,
    num_outputs,
    tensor_names,
)
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.models.model_folders import FACTORY, WEIGHTS

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid}
TRANSFORMERS = ("albert", "bert", "distilbert", "electra", "roberta", "vit")
"""Encoders that transformers has, by their model types."""
DEFAULT_ENCODERS = {
    "number": "passthrough", "binary": "passthrough", "category": "dense", "text": "parallel_cnn",
    "image": "stacked_cnn",
}  # fmt: skip
FILTER_SIZES = (2, 3, 4, 5)  # of parallel_cnn, in tokens

Options = Mapping[str, Any]


class FeatureEncoder(nn.Module):
    """Turns the tensor of one input into [rows, width]."""

    width: int


class ScalarEncoder(FeatureEncoder):
    """Numbers as they are, or categories as they are or one-hot, and fully connected layers ("dense")."""

    def __init__(self, *, num_classes: int, options: Options) -> None:
        super().__init__()
        self._num_classes = num_classes
        self.layers, self.width = fully_connected(num_classes, options, num_layers=int(options["type"] == "dense"))

    def forward(self, values: Tensor) -> Tensor:
        """values: [rows], numbers, or numbers of classes if there are several."""
        one_hot = values.unsqueeze(1) if self._num_classes == 1 else nn.functional.one_hot(values, self._num_classes)
        result: Tensor = self.layers(one_hot.to(values.dtype if values.is_floating_point() else torch.float32))
        return result


class EmbeddingEncoder(FeatureEncoder):
    """An embedding of categories, or of the tokens of a text: their mean, or the largest values of convolutions."""

    def __init__(self, *, num_embeddings: int, options: Options) -> None:
        super().__init__()
        size, self._is_text = options.get("embedding_size"), options["type"] != "dense"
        self.width = size or (256 if self._is_text else min(50, num_embeddings))
        self.embedding = nn.Embedding(num_embeddings, self.width)
        self.convolutions = nn.ModuleList()
        self.layers: nn.Module = nn.Identity()
        if options["type"] == "parallel_cnn":
            filters = options.get("num_filters", 256)
            self.convolutions.extend(nn.Conv1d(self.width, filters, size, padding=size - 1) for size in FILTER_SIZES)
            self.layers, self.width = fully_connected(filters * len(FILTER_SIZES), options, num_layers=2)

    def forward(self, values: Tensor) -> Tensor:
        """values: categories [rows], or token + 1 [rows, tokens], 0 where there is none."""
        if not self._is_text:
            return torch.as_tensor(self.embedding(values))
        is_token = (values > 0).unsqueeze(-1)
        states = self.embedding(values) * is_token
        if not len(self.convolutions):
            return torch.as_tensor(states.sum(1) / is_token.sum(1).clamp(min=1))
        tokens, num_tokens = states.transpose(1, 2), values.shape[1]
        maps = [each(tokens)[..., :num_tokens].relu() * is_token.transpose(1, 2) for each in self.convolutions]
        result: Tensor = self.layers(torch.cat([each.amax(-1) for each in maps], 1))
        return result


class ImageEncoder(FeatureEncoder):
    """Two convolutions, each with pooling, and fully connected layers."""

    def __init__(self, *, channels: int, size: int, options: Options) -> None:
        super().__init__()
        filters = options.get("num_filters", 32)
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(filters, 2 * filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.layers, self.width = fully_connected(2 * filters * (size // 4) ** 2, options, num_layers=1, size=128)

    def forward(self, values: Tensor) -> Tensor:
        """values: [rows, channels, size, size]."""
        result: Tensor = self.layers(self.convolutions(values))
        return result


class TransformerEncoder(FeatureEncoder):
    """The first state of an encoder of transformers, of texts or images."""

    def __init__(self, feature: Feature, options: Options) -> None:
        from transformers import AutoConfig, AutoModel

        super().__init__()
        self._is_text = feature["type"] == "text"
        fields = {name: value for name, value in options.items() if name not in ("type", "use_pretrained")}
        if self._is_text:
            fields |= {"vocab_size": feature["num_tokens"], "max_position_embeddings": feature["max_length"] + 2}
        else:
            fields |= {"image_size": feature["size"], "num_channels": feature["channels"]}
        self.model = AutoModel.from_config(AutoConfig.for_model(options["type"], **fields))
        self.model.pooler = None  # its weights would not be trained
        self.width = self.model.config.hidden_size

    def forward(self, values: Tensor) -> Tensor:
        """values: token + 1 [rows, tokens], 0 where there is none; or pixels."""
        if self._is_text:
            states = self.model(input_ids=(values - 1).clamp(min=0), attention_mask=(values > 0).long())
        else:
            states = self.model(pixel_values=values)
        return states.last_hidden_state[:, 0]  # type: ignore[no-any-return]


class FeatureModel(nn.Module):
    """Encoders, the concatenation of their outputs, fully connected layers, and decoders."""

    def __init__(self, features: Sequence[Feature], *, options: Mapping[str, Options], combiner: Options) -> None:
        super().__init__()
        inputs = [each for each in features if not each.get("is_output")]
        outputs = [each for each in features if each.get("is_output")]
        self._names = tensor_names(features)[: len(inputs)]
        encoders = [build_encoder(each, options.get(each["name"], {})) for each in inputs]
        self.encoders = nn.ModuleList(encoders)
        self.combiner, width = fully_connected(sum(each.width for each in encoders), combiner)
        self.decoders = nn.ModuleList()
        for each in outputs:
            layers, last = fully_connected(width, options.get(each["name"], {}))
            self.decoders.append(nn.Sequential(layers, nn.Linear(last, num_outputs(each))))

    def forward(self, **batch: Tensor) -> dict[str, Any]:
        """Returns the `outputs`, [rows, classes] of each, or [rows, 1] of numbers; `logits` are those of the first."""
        states = [encoder(batch[name]) for encoder, name in zip(self.encoders, self._names, strict=True)]
        combined = self.combiner(torch.cat(states, -1))
        outputs = tuple(decoder(combined) for decoder in self.decoders)
        return {"logits": outputs[0], "outputs": outputs}


def build_feature_model(
    *, features: Sequence[Feature], options: Mapping[str, Options], combiner: Options
) -> FeatureModel:
    """Returns the model of features, which the data measures.

    Args:
        features: Inputs before outputs, as `PreparedData.features` has them.
        options: By feature, the options of its encoder, with its `type`, or of its decoder.
        combiner: The options of the layers after the concatenation.
    """
    return FeatureModel(features, options=options, combiner=combiner)


def build_encoder(feature: Feature, options: Options) -> FeatureEncoder:
    """Returns the encoder of an input. options: as of Ludwig; `type` is by default that of Ludwig."""
    kind = feature["type"]
    options = {"type": DEFAULT_ENCODERS[kind], **options}
    if options["type"] in TRANSFORMERS:
        return TransformerEncoder(feature, options)
    if kind == "image":
        return ImageEncoder(channels=feature["channels"], size=feature["size"], options=options)
    if kind == "text":
        return EmbeddingEncoder(num_embeddings=feature["num_tokens"] + 1, options=options)
    num_classes = len(feature.get("categories", ("",)))
    if kind == "category" and options["type"] == "dense":
        return EmbeddingEncoder(num_embeddings=num_classes, options=options)
    return ScalarEncoder(num_classes=num_classes, options=options)


def fully_connected(width: int, options: Options, *, num_layers: int = 0, size: int = 256) -> tuple[nn.Module, int]:
    """Returns fully connected layers after `width` values, and the width after them.

    options: `num_fc_layers`, `output_size`, `activation` and `dropout`. num_layers, size: what these are by default.
    """
    layers: list[nn.Module] = []
    for _ in range(options.get("num_fc_layers", num_layers)):
        layers += [nn.Linear(width, options.get("output_size", size)), ACTIVATIONS[options.get("activation", "relu")]()]
        width = options.get("output_size", size)
        if options.get("dropout"):
            layers.append(nn.Dropout(options["dropout"]))
    return nn.Sequential(*layers), width


class FeaturePredictor:
    """An exported model that predicts rows. folder: what a job has exported."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_model

        kwargs = json.loads((folder / FACTORY).read_text())["kwargs"]
        self._features = kwargs["features"]
        self._model = build_feature_model(**kwargs).eval()
        load_model(self._model, folder / WEIGHTS)
        lengths = [each["max_length"] for each in self._features if "max_length" in each]
        self._context = SampleContext(
            spec=DataSpec(),
            options=None,
            max_length=max(lengths, default=1),
            _tokenizer=RowTokenizer(folder) if lengths else None,
        )
        self._encoders = [ValueEncoder(each) for each in self._features if not each.get("is_output")]

    @torch.no_grad()
    def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the outputs of each row, by name: the class, or the number in the unit of the data.

        rows: values by the names of the data's columns. Raises ValueError where one is none of its type.
        """
        columns: dict[str, Any] = {}
        for name, encode in zip(tensor_names(self._features), self._encoders, strict=False):
            column = encode.feature.get("column") or encode.feature["name"]
            values = [torch.as_tensor(encode(row.get(column), self._context)) for row in rows]
            is_text = encode.feature["type"] == "text"
            columns[name] = (pad_sequence(values, batch_first=True) if is_text else torch.stack(values)).numpy()
        outputs = self._model(**FeatureRows().collate(columns))["outputs"]
        result: list[dict[str, Any]] = [{} for _ in rows]
        for each, logits in zip(self._features[len(self._encoders) :], outputs, strict=True):
            for row, values in zip(result, logits, strict=True):
                number = values.argmax().item() if len(values) > 1 else values.item()
                row[each["name"]] = (
                    each["categories"][number] if len(values) > 1 else number * each["scale"] + each["shift"]
                )
        return result
