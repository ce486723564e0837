"""Unedited scripts as jobs: killed at random, they end as if undisturbed. Six are TRL's own, six a user's."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringmaster.features.external_trainers.child import inspect_script
from ringmaster.techniques import DataSpec, ModelSpec
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobReady, Steps
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.processes.reporter import MEASURE, STOP
from tests.integration.workbench import Layout, is_bit_equal, largest_difference

pytestmark = pytest.mark.timeout(1800)  # TRL is imported up to four times
SCRIPTS = Path(__file__).parents[1] / "scripts"
EXAMPLE = Path(__file__).parents[3] / "examples" / "hf_trainer" / "train.py"
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "{num_devices}")
ALONE, TOGETHER = Layout("command", 1), Layout("command", 2)
NUM_STEPS = 10
OPTIONS = ("--max_steps", str(NUM_STEPS), "--per_device_train_batch_size", "4", "--learning_rate", "0.01")
OF_TRL = ("--report_to", "none", "--use_cpu", "true", "--bf16", "false", "--disable_tqdm", "true")
REWARD = "def by_length(completions, **_):\n    return [float(len(text) % 7) for text in completions]\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with its tokenizer, as `from_pretrained` reads it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    folder = tmp_path_factory.mktemp("base")
    words = ["<pad>", "</s>", "<unk>", "the", "cat", "dog", "ran", "sat", "times", *"0123456789"]
    plain = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), eos_token_id=1, pad_token_id=0, attention_dropout=0.1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


ROWS: dict[str, Callable[[int], dict]] = {
    "sft": lambda i: {"text": f"the cat ran {i} times"},
    "dpo": lambda i: {"prompt": f"the cat {i}", "chosen": " ran times", "rejected": " sat times"},
    "kto": lambda i: {"prompt": f"the dog {i}", "completion": " ran times", "label": i % 2 == 0},
    "reward": lambda i: {"chosen": f"the cat ran {i}", "rejected": f"the dog sat {i}"},
    "grpo": lambda i: {"prompt": f"the dog {i % 10}"},
    "rloo": lambda i: {"prompt": f"the cat {i % 10}"},
}


def of_trl(name, base, folder):
    """Returns the words of one of TRL's own scripts, which lie in its wheel."""
    import trl

    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps(ROWS[name](i)) for i in range(24)))
    words = [str(Path(trl.__file__).parent / "scripts" / f"{name}.py"), "--output_dir", "out", *OPTIONS, *OF_TRL]
    words += ["--model_name_or_path", str(base), "--dataset_name", str(data)]
    if name in ("grpo", "rloo"):
        (folder / "rewards_beside.py").write_text(REWARD)
        words += [
            "--reward_funcs",
            "rewards_beside.by_length",
            "--num_generations",
            "2",
            "--max_completion_length",
            "6",
        ]
    return (sys.executable, *words)


def job(bench, words, folder, **changes):
    model = ModelSpec(command=words, adopt=str(folder))
    defaults = {"num_steps": NUM_STEPS, "global_batch_size": 4}
    return bench.job(model, data=DataSpec(source="command"), **{**defaults, **changes})


def killing(at_step):
    """Kills a gang once a checkpoint of step `at_step` or later is written."""

    def kill(gang, event):
        if isinstance(event, CheckpointSaved) and event.step >= at_step:
            gang.kill()

    return kill


def killed_and_undisturbed(bench, words, folder, *, num_kills=2):
    """Trains a script once undisturbed, and once killed at random."""
    (folder / "cwd").mkdir(exist_ok=True)
    theirs = job(bench, words, folder / "cwd")
    undisturbed = bench.train(theirs, ALONE, folder / "undisturbed")
    assert undisturbed.outcome.status == "done", undisturbed.outcome
    draw = random.Random(str(words))
    for at_step in sorted(draw.sample(range(1, NUM_STEPS), num_kills)):
        killed = bench.train(
            theirs, ALONE, folder / "killed", on_event=killing(at_step), checkpoint_every_s=draw.choice([0.001, 0.05])
        )
        assert killed.outcome.status in ("crashed", "done"), killed.outcome
    resumed = bench.train(theirs, ALONE, folder / "killed")
    assert resumed.outcome.status == "done", resumed.outcome
    return resumed, undisturbed


def assert_same(resumed, undisturbed):
    first_step = resumed.outcome.result.first_step
    assert resumed.losses == undisturbed.losses[first_step:]
    assert is_bit_equal(resumed.weights, undisturbed.weights)
    # Not what a trainer averages between two logs, of which a resumed one has seen fewer steps.
    assert resumed.outcome.result.metrics["loss"] == undisturbed.outcome.result.metrics["loss"]


def test_a_plain_loop_with_five_lines(bench, tmp_path):
    resumed, undisturbed = killed_and_undisturbed(
        bench, (sys.executable, str(SCRIPTS / "loop.py"), str(NUM_STEPS)), tmp_path
    )
    metrics = [trained.outcome.result.metrics for trained in (resumed, undisturbed)]
    assert metrics == [{"loss": undisturbed.losses[-1]}] * 2
    states = [(tmp_path / name / "model" / "state.json").read_text() for name in ("killed", "undisturbed")]
    assert states[0] == states[1]  # nothing was exported: the last checkpoint is the model


def test_a_plain_loop_does_nothing_without_a_supervisor(tmp_path):
    words = [sys.executable, str(SCRIPTS / "loop.py"), "3"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2] / "src")}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "the loop is over\n"
    assert not list(tmp_path.iterdir())


def test_reporting_imports_nothing_beyond_the_standard_library():
    code = "import sys; before = set(sys.modules); import ringmaster.report; print(set(sys.modules) - before)"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2] / "src")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in eval(ended.stdout)}
    assert tops - sys.stdlib_module_names == {"ringmaster"}


def test_a_plain_loop_stops_when_told_and_ends_a_trial(bench, tmp_path):
    endless = job(bench, (sys.executable, str(SCRIPTS / "loop.py"), "1000000"), tmp_path, num_steps=1_000_000)

    def stop(gang, event):
        if isinstance(event, Steps):
            gang.send(STOP)

    trained = bench.train(endless, ALONE, tmp_path / "run", on_event=stop)
    assert trained.outcome.status == "preempted", trained.outcome
    assert trained.outcome.result.step == trained.said("checkpoint")[-1].step > 0

    def measure(gang, event):
        if isinstance(event, JobReady):
            gang.send(MEASURE)
        elif event.NAME == "measured":
            gang.send(STOP)

    tried = bench.train(endless, ALONE, tmp_path / "trial", on_event=measure, purpose=TRIAL)
    assert tried.outcome.status == "done", tried.outcome
    assert tried.said("measured")[0].profile["step_s"] == pytest.approx(0.01, abs=0.05)


def test_a_job_of_other_steps_than_its_script_is_told_the_number(bench, tmp_path):
    short = job(bench, (sys.executable, str(SCRIPTS / "loop.py"), "4"), tmp_path)
    outcome = bench.train(short, ALONE, tmp_path / "run").outcome
    assert outcome.status == "invalid"
    assert "ended by itself after step 4, and its job has 10 steps. To fix: num_steps: 4" in outcome.message


@pytest.mark.full
def test_a_trainer_says_its_steps_and_its_batch(bench, tmp_path):
    words = (sys.executable, str(SCRIPTS / "trainer_best.py"), "15")
    assert inspect_script(job(bench, words, tmp_path), num_devices=1) == {"num_steps": 15, "global_batch_size": 4}
    loop = (sys.executable, str(SCRIPTS / "accelerate_regression.py"), "15")
    with pytest.raises(ValueError, match="To fix: give --steps"):
        inspect_script(job(bench, loop, tmp_path), num_devices=1)


@pytest.mark.full
@pytest.mark.parametrize("name", ["trainer_plain", "accelerate_regression"])
def test_a_users_script_ends_as_if_never_killed(bench, tmp_path, name):
    words = (sys.executable, str(SCRIPTS / f"{name}.py"), str(NUM_STEPS))
    assert_same(*killed_and_undisturbed(bench, words, tmp_path, num_kills=1))


@pytest.mark.full
@pytest.mark.parametrize("num_steps", [8, 10])  # an epoch is five steps
def test_a_script_killed_after_its_last_checkpoint_does_no_further_step(bench, tmp_path, num_steps):
    words = (sys.executable, str(SCRIPTS / "trainer_plain.py"), str(num_steps))
    theirs = job(bench, words, tmp_path, num_steps=num_steps)
    undisturbed = bench.train(theirs, ALONE, tmp_path / "run")
    resumed = bench.train(theirs, ALONE, tmp_path / "run")
    assert (undisturbed.outcome.status, resumed.outcome.status) == ("done", "done"), resumed.outcome
    assert resumed.outcome.result.first_step == num_steps
    assert resumed.losses == []
    assert is_bit_equal(resumed.weights, undisturbed.weights)
    assert resumed.outcome.result.metrics == undisturbed.outcome.result.metrics


@pytest.mark.full
@pytest.mark.parametrize("name", ["trainer_best", "accelerate_llama", "trl_lora"])
def test_a_users_larger_script_ends_as_if_never_killed(bench, tmp_path, base, name):
    words = (sys.executable, str(SCRIPTS / f"{name}.py"), str(NUM_STEPS), str(base))
    assert_same(*killed_and_undisturbed(bench, words, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_a_script_of_trl_ends_as_if_never_killed(bench, tmp_path, base, name):
    (tmp_path / "cwd").mkdir()
    assert_same(*killed_and_undisturbed(bench, of_trl(name, base, tmp_path / "cwd"), tmp_path))


@pytest.mark.full
def test_two_devices_train_the_same_global_batch(bench, tmp_path):
    """The script's batch of a device is divided, so that the number of devices does not change the model."""
    words = (*TORCHRUN, str(EXAMPLE), "--hidden-size", "16", "--steps", "6")
    theirs = job(bench, words, tmp_path, num_steps=6, global_batch_size=8)
    alone, together = (bench.train(theirs, layout, tmp_path / str(layout.num_devices)) for layout in (ALONE, TOGETHER))
    assert (alone.outcome.status, together.outcome.status) == ("done", "done"), together.outcome
    assert together.losses == pytest.approx(alone.losses, abs=1e-4)
    assert largest_difference(together.weights, alone.weights) <= 1e-4
