"""Models with different image processors are compared on the same images, each read by its own processor."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from ringmaster.flows.retraining.examine import EvaluatedModel, examine_models
from ringmaster.techniques import DataSpec

LABELS = ("cat", "dog")


def model_of(folder, mean):
    names = dict(enumerate(LABELS))
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    ViTForImageClassification(config).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"image_mean": [mean] * 3}))
    return EvaluatedModel(label=folder.name, folder=folder)


def test_each_side_of_a_comparison_reads_images_by_its_own_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    draw = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / "images" / LABELS[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(255, size=(12, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    models = [model_of(tmp_path / name, mean) for name, mean in (("first", 0.5), ("second", -3.0))]

    def losses(*examined, against=None):
        results = examine_models(
            examined,
            data=DataSpec(path=str(tmp_path / "images" / "**" / "*")),
            tests=None,
            against=against,
            metrics=["loss"],
            max_rows=100,
            all_rows=True,
            notice=lambda text: None,
        )
        assert [result.faults for result in results] == [()] * len(results)
        return [(result.measured[0].value, result.measured[0].other) for result in results]

    (first, _), (second, _) = losses(*models)
    assert losses(models[1]) == [(pytest.approx(second), None)]
    assert losses(models[0], against=models[1]) == [(pytest.approx(first), pytest.approx(second))]
