"""Models of features train the same under every technique, and a Ludwig configuration runs end to end."""

import csv

import pytest

from ringmaster.features.ludwig.batch import FACTORY
from ringmaster.techniques import DataSpec, ModelSpec
from tests.integration.workbench import Layout, largest_difference
from tests.matrix import matrix

LAYOUTS = [
    Layout("ddp", 2, {"micro_batch": 3}),
    Layout("fsdp", 2, {"reshard": True}),
    Layout("zero1", 2),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14}),
    Layout("fsdp_static", 2, {"reshard": True}),
    Layout("single", 1, {"micro_batch": 3}),
]
FEATURES = [
    {"name": "size", "type": "number"},
    {"name": "town", "type": "category"},
    {"name": "new", "type": "binary"},
    {"name": "note", "type": "text"},
    {"name": "picture", "type": "image"},
    {"name": "rent", "type": "number", "is_output": True},
    {"name": "kind", "type": "category", "is_output": True},
]
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODERS = {
    "ludwig": {"note": {"type": "parallel_cnn", "embedding_size": 8, "num_filters": 4, "output_size": 16}},
    "transformers": {
        "note": {"type": "bert", **SIZES}, "picture": {"type": "vit", "patch_size": 4, **SIZES},
        "town": {"type": "onehot"}, "size": {"type": "dense", "output_size": 4},
    },
}  # fmt: skip
CASES = [(layout, name) for name in ENCODERS for layout in LAYOUTS]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("table")
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[each["name"] for each in FEATURES])
        writer.writeheader()
        for i in range(40):
            Image.new("L", (8, 8), color=i * 6).save(folder / f"{i}.png")
            note = " ".join(f"word{(i * k) % 7}" for k in range(1 + i % 5))
            writer.writerow(
                {"size": i * 7 % 23, "town": "abcd"[i % 4], "new": ("no", "yes")[i % 3 == 0], "note": note,
                 "picture": f"{i}.png", "rent": i * 13 % 31, "kind": "xyz"[i % 3]}
            )  # fmt: skip
    return DataSpec(path=str(folder / "rows.csv"), kind="features", kwargs={"features": FEATURES})


@pytest.mark.parametrize(("layout", "encoders"), matrix(CASES, quick=[CASES[0], CASES[7]]))
def test_every_technique_trains_the_same(bench, tmp_path, table, layout, encoders):
    model = ModelSpec(
        factory=FACTORY,
        kwargs={"options": ENCODERS[encoders], "combiner": {"num_fc_layers": 1, "output_size": 16, "dropout": 0.1}},
    )
    job = bench.job(model, data=table, loss="weighted-outputs", loss_options={"weights": [1.0, 0.5]})
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= 2e-7
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)
