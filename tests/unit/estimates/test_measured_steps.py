"""The times of a job's step on one device: few layers and rows tell those of the whole model, at the data's widths."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from ringmaster.codec import to_json
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates import measured_steps as measuring
from ringmaster.techniques.estimates.measured_steps import Widths, mean_widths, measured_step_times
from ringmaster.techniques.estimates.time_estimate import Estimator
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.batch_loader import BatchLoader
from tests.integration.workbench import RESNET, write_prose

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
DEEP = ModelSpec(architecture="LlamaForCausalLM", config={**TINY, "num_hidden_layers": 6})
SLOTS = (Slot(kind="cpu", index=0),)


class Marks:
    """A clock that is a second further at each reading, so that a step's seconds are the number of its marks."""

    def __init__(self):
        self._readings = count()

    def now(self):
        return float(next(self._readings))

    def seconds(self, first, last):
        return last - first

    def host_s(self, first, last):
        return 0.0


class WaitingMarks(Marks):
    """The clock of a GPU that computes nothing: all seconds are those of the host."""

    def host_s(self, first, last):
        return last - first


@pytest.fixture
def measure(tmp_path):
    prose = DataSpec(path=str(write_prose(tmp_path / "prose.txt")), seq_len=24, vocab_size=300)

    def of(model=DEEP, *, data=prose, slots=SLOTS, **changes):
        job = replace(Job(name="a", model=model, data=data, global_batch_size=8, num_steps=1), **changes)
        prepared = prepare(data, cache_dir=tmp_path)
        facts = model_facts(model, data=prepared, adapter=job.adapter, frozen=job.freeze)
        return measured_step_times(job, data=prepared, facts=facts, width=None, slots=slots, cache_dir=tmp_path)

    return of


@pytest.mark.parametrize("changes", [{}, {"adapter": Adapter(rank=2)}], ids=["full", "lora"])
def test_few_layers_tell_the_times_of_all(measure, tmp_path, monkeypatch, changes):
    monkeypatch.setattr(measuring, "_CpuClock", Marks)
    few = measure(**changes)
    (file,) = tmp_path.glob("step-times-*")
    file.unlink()
    monkeypatch.setattr(measuring, "tiny_config", lambda config, **_: config)
    whole = measure(**changes)
    assert few.launch_s == pytest.approx(whole.launch_s, rel=0.2)
    assert few.forward_share == pytest.approx(whole.forward_share, rel=0.2)
    assert few.layers_share == pytest.approx(whole.layers_share, rel=0.2)


def test_a_gpu_that_waits_for_the_host_gets_more_rows(measure, monkeypatch):
    monkeypatch.setattr(measuring, "_CpuClock", WaitingMarks)
    found = measure(global_batch_size=48)
    assert found.launch_s == 0.0
    assert found.host_s == pytest.approx(48 * found.row_s)  # as many marks for all rows as for two


def test_loads_that_turn_out_slow_while_steps_are_measured_are_left_out_of_all(measure, monkeypatch):
    load = BatchLoader._load

    def timed(loader, request, **arguments):
        return load(loader, request, **arguments)[0], 1.0 if len(request.rows) > 3 else 0.0

    monkeypatch.setattr(measuring, "_CpuClock", WaitingMarks)
    monkeypatch.setattr(BatchLoader, "_load", timed)
    found = measure(global_batch_size=48)
    assert found.load_s == pytest.approx(1 / 48)
    assert found.host_s == pytest.approx(48 * found.row_s)


class SlowSamples:
    """Samples of which each takes a mark of the clock to load."""

    clock = Marks()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.clock.now()
        return {"input_ids": torch.arange(24), "labels": torch.arange(24)}


def slow_samples():
    return SlowSamples(), SlowSamples()


@pytest.mark.parametrize("slow_s", [0.0, 1e3])
def test_what_a_gpu_loads_ahead_is_no_part_of_its_rows(measure, monkeypatch, slow_s):
    monkeypatch.setattr(SlowSamples, "clock", WaitingMarks())
    monkeypatch.setattr(measuring, "_CpuClock", lambda: SlowSamples.clock)
    monkeypatch.setattr("ringmaster.techniques.training.batch_loader.SLOW_S", slow_s)
    found = measure(data=DataSpec(factory=f"{__name__}:slow_samples"))
    assert 1 < found.load_s < 1.5 if slow_s == 0.0 else found.load_s == 0.0  # the marks around a load add one


def test_times_are_measured_once_for_all_jobs_that_differ_in_the_learning_rate_alone(measure, tmp_path):
    found = measure()
    assert found.launch_s + found.row_s > 0  # which one has it, is left to the clock
    assert found.update_s > 0
    (file,) = tmp_path.glob("step-times-*")
    file.write_text(json.dumps({**json.loads(file.read_text()), "row_s": 7.0}))
    assert measure(seed=5, num_steps=9).row_s == 7.0
    assert measure(global_batch_size=4).row_s != 7.0


def test_models_without_equal_layers_are_measured_whole(measure):
    found = measure(RESNET, data=DataSpec(source="digits"))
    assert found.launch_s + found.row_s > 0


def test_what_cannot_be_measured_is_told(measure, capfd):
    assert measure(loss="json:dumps") is None
    assert "steps are predicted by operations" in capfd.readouterr().err


def test_slow_steps_are_measured_once_and_quick_ones_often():
    def num_rounds(step_s):
        num = 0
        while measuring._goes_on(num, num * step_s):
            num += 1
        return num

    assert [num_rounds(step_s) for step_s in (30.0, 1.0, 0.1, 0.05, 0.001)] == [1, 2, 3, 5, 12]


def test_a_measurement_that_hangs_is_ended_soon(measure, monkeypatch, capfd):
    def hang(works, *, timeout_s, use_gpus):
        assert timeout_s <= 10 and not use_gpus
        raise RuntimeError("it took too long")

    monkeypatch.setattr(measuring, "in_children", hang)
    assert measure() is None
    assert "it took too long" in capfd.readouterr().err


class PaddedDataset:
    """Samples of these lengths."""

    def __init__(self, lengths, width=64):
        self._lengths, self.width = np.array(lengths), width

    def __len__(self):
        return len(self._lengths)

    def lengths(self):
        return self._lengths

    def longest(self, indices):
        return int(self._lengths[np.asarray(indices)].max())

    def rows(self, indices, *, width=None):
        raise AssertionError("no sample is read")


def test_widths_are_those_of_the_jobs_batches():
    job = Job(name="a", model=DEEP, data=DataSpec(), global_batch_size=4, num_steps=1)
    uneven = PaddedDataset([5] * 63 + [60])
    widths = mean_widths(job, uneven, PaddedDataset([9] * 6))
    assert widths.held_out == 16  # a multiple of 8
    assert widths.training == pytest.approx((15 * 8 + 64) / 16)  # one batch of sixteen has the long sample
    larger = mean_widths(replace(job, global_batch_size=16), uneven, uneven)
    assert larger.training == pytest.approx((3 * 8 + 64) / 4)
    grouped = mean_widths(
        replace(job, data=replace(job.data, sampling="length-grouped")), PaddedDataset(range(1, 65)), uneven
    )
    assert grouped.training < mean_widths(job, PaddedDataset(range(1, 65)), uneven).training
    assert mean_widths(replace(job, data=replace(job.data, padding="max_length")), uneven, uneven) == Widths()
    assert mean_widths(job, [0] * 8, [0]) == Widths()
    assert mean_widths(job, PaddedDataset([0] * 8, width=0), PaddedDataset([0] * 8, width=0)) == Widths()  # images


def test_a_trained_model_writes_as_much_as_the_true_answers():
    def row(*lengths):
        return {"labels": torch.tensor([([-100] + [5] * length + [-100] * 9)[:10] for length in lengths])}

    class Rows(list):
        def __getitem__(self, index):
            return {name: tensor[0] for name, tensor in row(super().__getitem__(index)).items()}

    job = Job(name="a", model=DEEP, data=DataSpec(), global_batch_size=2, num_steps=1)
    held_out = Rows([1, 3, 9, 2])
    assert mean_widths(job, held_out, held_out).written is None
    evaluation = replace(job.evaluation, metrics=("loss", "generated_exact_match"))
    assert mean_widths(replace(job, evaluation=evaluation), held_out, held_out).written == (3 + 9) / 2
    short = replace(job, evaluation=replace(evaluation, max_new_tokens=4))
    assert mean_widths(short, held_out, held_out).written == (3 + 4) / 2


def test_each_written_token_is_a_forward_of_one_token_a_row():
    times = measuring.StepTimes(launch_s=0.2, row_s=0.3, update_s=1.0, forward_share=0.5, layers_share=0.4)
    assert times.generating_s(num_rows=4, num_tokens=10, width=6) == pytest.approx(10 * 0.5 * (0.2 + 4 * 0.3 / 6))
    longer = times.with_generation(num_tokens=10, width=6)
    alone_s, step_s = times.launch_s + 4 * times.row_s, longer.launch_s + 4 * longer.row_s
    assert step_s == pytest.approx(alone_s + times.generating_s(num_rows=4, num_tokens=10, width=6))
    assert times.forward_share < longer.forward_share < 1


def test_steps_and_evaluations_of_a_model_that_writes_are_predicted(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"it is {i}"}]}
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(path=str(tmp_path / "rows.jsonl"), kind="chat", vocab_size=300, held_out=0.3)
    prepared = prepare(data, cache_dir=tmp_path)
    plain = Job(name="a", model=DEEP, data=data, global_batch_size=8, num_steps=1)
    writing = replace(plain, evaluation=replace(plain.evaluation, metrics=("loss", "generated_exact_match")))
    shape, single = GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 34), registry.BUILTIN["single"]
    found = {}
    for job in (plain, writing):
        order = PreflightOrder(
            jobs=(job,), shapes=(shape,), techniques={"single": single}, cache_dir=str(tmp_path), slots=SLOTS
        )
        facts = model_facts(job.model, data=prepared)
        estimator = Estimator(job, facts=facts, data=to_json(prepared), order=order)
        (candidate, *_), _ = estimator.weigh(registry.load(single), shape)
        found[job is writing] = candidate
    assert found[True].step_s > 0
    assert found[True].evaluate_s > 2 * found[False].evaluate_s
