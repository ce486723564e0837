"""Joint scoring of many adapters over one base, bit-equal to separate scoring; other models are scored separately."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ringmaster.codec import to_json
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.examination import ExaminationRequest, examine, examine_each
from ringmaster.tasks.evaluation.scores import Cases, score_models
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, Job
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.adapters import first_state, sites
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_adapter, export_model
from ringmaster.techniques.scoring import score_together
from ringmaster.techniques.scoring import scoring_worker as together_module
from tests.integration.workbench import DIGITS, GPT2, LLAMA, VIT, write_prose

DEVICE = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())
LORAS = {
    "plain": Adapter(rank=4),
    "twin": Adapter(rank=4),
    "thin": Adapter(rank=2, alpha=3.0),
    "thick": Adapter(rank=16, rank_stabilised=True),
}
SCALES, HEADED = Adapter(kind="ia3"), Adapter(rank=4, modules_to_save=("lm_head", "norm"))


class Shelf:
    """A base in a folder, its data, and adapters with random tensors, so that their outputs differ."""

    def __init__(self, folder: Path, model, data):
        self.folder, self.spec, self.cache_dir = folder, model, folder / "cache"
        self.job = Job(
            name="shelf",
            model=model,
            data=data,
            num_steps=1,
            global_batch_size=4,
            evaluation=EvaluationSpec(max_batches=18),
        )
        self.prepared = prepare(data, cache_dir=self.cache_dir)
        self.base = self.whole("base", seed=0)

    def whole(self, name, *, seed):
        model = build_model(self.spec, data=self.prepared, seed=seed)
        folder = self.folder / name
        export_model(folder, spec=self.spec, model=model, state=model.state_dict(), prepared=self.prepared)
        return folder

    def adapter(self, name, adapter, *, seed, base=None):
        base = base or self.base
        model = build_model(self.spec, data=self.prepared, seed=0, weights_from=base)
        state = first_state(model, adapter, sites(model, adapter), seed=seed)
        draw = torch.Generator().manual_seed(seed)
        state = {key: value + 0.1 * torch.randn(value.shape, generator=draw) for key, value in state.items()}
        folder = self.folder / name
        export_adapter(folder, adapter=adapter, spec=self.spec, base=str(base), state=state, prepared=self.prepared)
        return folder

    def adapters(self):
        return {name: self.adapter(name, adapter, seed=seed) for seed, (name, adapter) in enumerate(LORAS.items())}

    def score(self, models, **options):
        return score_together(models, job=self.job, cache_dir=self.cache_dir, **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    file = write_prose(folder / "words.txt", num_lines=150)
    return Shelf(folder, LLAMA, DataSpec(path=str(file), seq_len=16, vocab_size=300, held_out=0.5))


@pytest.fixture
def alone(monkeypatch):
    """The folders that were scored separately."""
    from ringmaster.techniques.scoring import row_scores

    asked, ask = [], row_scores.score_alone
    monkeypatch.setattr(
        row_scores, "score_alone", lambda folder, *args, **more: asked.append(folder) or ask(folder, *args, **more)
    )
    return asked


def assert_same(found, expected, names):
    for name in names:
        one, two = found.scores[name].arrays, expected.scores[name].arrays
        assert one.keys() == two.keys()
        for key, values in two.items():
            assert np.array_equal(one[key], values), (name, key)


def test_adapters_of_one_base_say_together_what_each_says_alone(words, alone):
    other = words.whole("other", seed=1)
    cannot = {
        "elsewhere": words.adapter("elsewhere", Adapter(rank=4), seed=9, base=other),
    }
    can = {
        "base": words.base,
        **words.adapters(),
        "few": words.adapter("few", Adapter(rank=4, targets=("q_proj",)), seed=6),
        "scales": words.adapter("scales", SCALES, seed=7),
        "headed": words.adapter("headed", HEADED, seed=10),
        "prefix": words.adapter("prefix", Adapter(kind="prefix", num_virtual_tokens=3), seed=8),
    }
    told = []
    found = words.score({**can, **cannot}, progress=lambda done, of: told.append((done, of)))
    assert not found.faults
    assert sorted(alone) == sorted(cannot.values())
    assert told[-1] == (72 * 10, 72 * 10)
    assert told == sorted(told)
    expected = words.score({**can, **cannot}, shares_batches=False)
    assert len(alone) == 1 + 10
    assert_same(found, expected, {**can, **cannot})
    losses = {name: scores.arrays["loss_sums"] for name, scores in found.scores.items()}
    assert all(len(values) == 72 for values in losses.values())
    assert len({values.tobytes() for values in losses.values()}) == 10  # every model gives different losses


def test_texts_of_any_length_are_asked_together(words, alone):
    models = {"base": words.base, **words.adapters()}
    (models["thin"] / "tokenizer.json").unlink()  # as peft saves an adapter: the base's tokenizer is used then
    texts = ["ba", "bane", "banor dukan.", "fo banor dukan tan. fe", "fe", "banor dukan tan dukan. banor", "banor"]
    found = words.score(models, texts=texts)
    assert not found.faults
    assert not alone
    assert_same(found, words.score(models, texts=texts, shares_batches=False), models)


def test_images_are_asked_together(tmp_path, alone):
    shelf = Shelf(tmp_path, VIT, DIGITS)
    models = {"base": shelf.base, **shelf.adapters()}
    found = shelf.score(models, max_rows=70)  # the last six rows are fewer than a batched product allows
    assert not alone
    assert_same(found, shelf.score(models, max_rows=70, shares_batches=False), models)
    assert found.scores["thin"].arrays["probabilities"].shape == (70, 10)


def test_gpt2_is_asked_together(words, tmp_path, alone):
    shelf = Shelf(tmp_path, GPT2, words.job.data)
    models = shelf.adapters()
    found = shelf.score(models, max_rows=9)
    assert not alone
    assert_same(found, shelf.score(models, max_rows=9, shares_batches=False), models)


def test_one_that_does_not_fit_and_one_that_says_nothing_harm_no_other(words, alone, tmp_path):
    models = words.adapters()
    expected = words.score(models, max_rows=9)
    broken = words.adapter("broken", Adapter(rank=4), seed=3)
    weights = broken / "adapter_model.safetensors"
    save_file({key: value * float("nan") for key, value in load_file(weights).items()}, weights)
    unfit = words.adapter("unfit", Adapter(rank=4), seed=3)
    said = json.loads((unfit / "adapter_config.json").read_text())
    (unfit / "adapter_config.json").write_text(json.dumps({**said, "r": 5}))
    found = words.score({"broken": broken, "unfit": unfit, "gone": tmp_path, **models}, max_rows=9)
    assert found.faults.keys() == {"unfit", "gone"}
    assert "does not fit" in found.faults["unfit"]
    assert np.isnan(found.scores["broken"].arrays["loss_sums"]).all()
    assert_same(found, expected, models)
    assert sorted(alone) == sorted([unfit, tmp_path])


def test_what_comes_in_the_way_is_no_reason_to_say_nothing(words, alone, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("no room for so many")

    models = words.adapters()
    expected = words.score(models, max_rows=9)
    monkeypatch.setattr(together_module, "_score_over_one_base", full)
    assert_same(words.score(models, max_rows=9), expected, models)
    assert sorted(alone) == sorted(models.values())


@pytest.mark.full
def test_a_worker_asks_together_and_tells_how_far_it_is(words, bench):
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=words.cache_dir)
    models, data = {"base": words.base, **words.adapters()}, to_json(words.prepared)
    found = score_models(models, job=words.job, data=data, environment=environment, device=DEVICE)
    bf16 = replace(words.job, precision="bf16")  # scored separately
    half = score_models(models, job=bf16, cases=Cases(texts=("banor dukan.",)), environment=environment, device=DEVICE)
    assert not found.faults
    assert not half.faults
    expected = words.score(models, shares_batches=False)
    for name in models:
        assert np.array_equal(found.scores[name].sums["loss_sums"], expected.scores[name].arrays["loss_sums"])


class Spawning:
    """A fork server that stores the targets of the processes that it is asked to start."""

    def __init__(self, server):
        self._server, self.targets = server, []

    def spawn(self, *, target, **options):
        self.targets.append(target.removeprefix("ringmaster.techniques.scoring."))
        return self._server.spawn(target=target, **options)


SUITE = """\
name: words
slices:
  - {name: length, tokens: [16]}
tests:
  - {name: order, kind: minimum, texts: [banor dukan., fo banor], over: [dukan banor., banor fo]}
  - {name: case, kind: invariance, texts: [banor dukan tan.], change: {case: upper}, tolerance: 0.1}
assertions:
  - {name: sane, finite: [loss]}
"""


@pytest.mark.full
def test_a_suite_asks_many_adapters_the_same_cases_at_once(words, bench, tmp_path):
    (tmp_path / "tests.yaml").write_text(SUITE)
    server = Spawning(bench.server)
    environment = GangEnvironment(server=server, devices=(DEVICE,), cache_dir=words.cache_dir)
    models = words.adapters()
    asked = {"job": words.job, "data": to_json(words.prepared), "suite": load_suite(tmp_path / "tests.yaml")}
    asked |= {"against": words.base, "max_rows": 20, "environment": environment, "device": DEVICE, "folder": tmp_path}
    request = ExaminationRequest(**asked)
    found = examine_each({**models, "gone": tmp_path / "gone"}, request)
    assert len(server.targets) == 2  # one process for the rows, one for the cases
    assert {name: examined.num_rows for name, examined in found.items()} == {**dict.fromkeys(models, 20), "gone": 0}
    assert "holds no model" in found["gone"].faults[0]
    assert not found["gone"].passed
    for name, folder in models.items():
        assert found[name] == examine(folder, request)
    gains = {examined.measured[0].gain for name, examined in found.items() if name != "gone"}
    assert len(gains) == len(models)
