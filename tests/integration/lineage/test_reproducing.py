"""`ringmaster reproduce`: a model is made again from its lineage, and what differs is found and named."""

import json
import random
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from ringmaster.codec import to_json
from ringmaster.errors import InputError
from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.features.reproduction import reproducing
from ringmaster.features.reproduction.reproducing import ReproductionOptions, reproduce
from ringmaster.features.target.job import Phases
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.flows import cli
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage.base_models import record_base
from ringmaster.tasks.recording.model_writer import CHAIN, TRAINING
from ringmaster.techniques import Adapter
from ringmaster.techniques.checkpoints.checkpoint import CheckpointFile, folder_of, read_manifest, stored_manifest
from ringmaster.techniques.checkpoints.storage import MANIFEST, LocalStorage
from ringmaster.techniques.job_specs import ScheduleSpec
from tests.integration.lineage.family import in_home
from tests.integration.lineage.trained import LINKS, job_of, record, train, write_rows
from tests.integration.workbench import SINGLE, Layout
from tests.matrix import matrix


@pytest.fixture(autouse=True)
def warm_server(bench, monkeypatch):
    monkeypatch.setattr(reproducing, "fork_server_for", lambda jobs: nullcontext(bench.server))


@pytest.fixture
def home(tmp_path):
    with in_home(tmp_path / "home"):
        (tmp_path / "home").mkdir()
        yield tmp_path / "home"


@pytest.fixture(scope="module")
def trained_once(bench, tmp_path_factory):
    """A recorded model that no test changes."""
    home = tmp_path_factory.mktemp("once")
    with in_home(home):
        return train(bench, home, job_of(bench, write_rows(home / "rows.jsonl")))


@pytest.fixture
def made_once(trained_once):
    with in_home(trained_once.home):
        yield trained_once


def test_a_model_is_made_again_bit_by_bit_in_a_fresh_folder(made_once):
    made, home = made_once, made_once.home

    report = made.reproduced()

    assert report.is_equal, report.sentences()
    assert (report.steps, len(report.links), report.files) == (9, 3, ())
    assert load_file(report.folder / "model.safetensors").keys() == load_file(model_of(home, made.name)).keys()
    assert "every tensor is equal" in report.sentences()[0]


def model_of(home, name):
    return home / "batches" / name / "model" / "model.safetensors"


@pytest.mark.full
def test_layouts_that_were_switched_are_switched_again(bench, home, tmp_path):
    layouts = (SINGLE, Layout("ddp", 2), Layout("fsdp", 2, {"reshard": True}))
    made = train(bench, home, job_of(bench, write_rows(tmp_path / "rows.jsonl")), layouts=layouts)

    assert made.reproduced().is_equal


@pytest.mark.full
def test_a_job_that_went_on_with_local_updates_is_made_again(bench, home, tmp_path):
    job = job_of(bench, write_rows(tmp_path / "rows.jsonl"))
    local = LocalUpdates(workers=2, sync_every=2, warmup_steps=3)
    changed = replace(job.phase(0), first_step=3, features=(local,))
    layouts = (Layout("ddp", 2), *(Layout("local", num, {"micro_batch": 4}) for num in (2, 1)))
    made = train(bench, home, job.with_features(Phases(phases=(job.phase(0), changed))), layouts=layouts)

    report = made.reproduced()

    assert report.is_equal and len(report.links) == 3, report.sentences()


# A whole repetition, which differs from the one below in where it begins.
@pytest.mark.full
def test_a_job_whose_steps_were_set_while_it_ran_is_made_again_from_the_checkpoint_before(bench, home, tmp_path):
    job = job_of(bench, write_rows(tmp_path / "rows.jsonl"), schedule=ScheduleSpec(name="linear"))
    folder = home / "batches" / job.name
    longer = replace(job, num_steps=2 * job.num_steps)
    assert bench.train(longer, SINGLE, folder, last_step=LINKS[0], keep_checkpoints=10).outcome.status in (
        "done",
        "preempted",
    )
    own = WarmStart(checkpoints=str(folder / "checkpoints"), step=0)
    made = train(bench, home, job.with_features(own), layouts=(SINGLE, SINGLE))

    report = made.reproduced()
    assert report.is_equal, report.sentences()
    assert report.steps == LINKS[-1] - LINKS[0]

    shutil.rmtree(folder / "checkpoints" / folder_of(LINKS[0]))
    with pytest.raises(InputError, match=f"its steps were set after step {LINKS[0]}, where it continues: "):
        made.reproduced()


# Layouts of exact jobs are compared bit by bit in tests/integration/techniques/test_exact.py.
@pytest.mark.full
def test_an_exact_job_of_several_layouts_is_made_again_on_one_device(bench, home, tmp_path):
    layouts = (Layout("ddp", 2, {"micro_batch": 4}), Layout("fsdp", 2, {"reshard": True, "micro_batch": 4}), SINGLE_4)
    job = job_of(bench, write_rows(tmp_path / "rows.jsonl"), exact=True, exact_chunk=4)
    made = train(bench, home, job, layouts=layouts)

    report = made.reproduced(technique="single")

    assert report.is_equal, report.sentences()
    assert report.steps == 9


@pytest.mark.full
def test_an_adapter_with_dropout_is_made_again_after_its_base_that_is_lost(bench, home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    base = train(bench, home, job_of(bench, rows), layouts=(SINGLE,))
    job = job_of(bench, rows, name="tuned", base=base.name, adapter=Adapter(rank=2, dropout=0.1))
    folder = home / "batches" / "tuned"
    trained = bench.train(job, SINGLE, folder, weights_from=str(home / "batches" / base.name / "model"))
    assert trained.outcome.status == "done", trained.outcome
    made = record(bench, home, job, folder, {}, parents={base.name: f"models:/{base.name}/1"})
    lose_files(made, base.name)

    assert made.reproduced().is_equal


# A whole repetition, with files that other tests of the store bring back.
@pytest.mark.full
def test_a_folder_that_is_lost_is_brought_back_from_the_store(bench, home, tmp_path):
    first = job_of(bench, write_rows(tmp_path / "rows.jsonl"), name="first")
    train(bench, tmp_path, first, layouts=(SINGLE,))
    folder = tmp_path / "batches" / "first" / "model"
    model, data = replace(first.model, from_pretrained=str(folder)), replace(first.data, tokenizer=str(folder))
    job = replace(first, name="tuned", model=model, data=data)
    assert bench.train(job, SINGLE, home / "batches" / "tuned").outcome.status == "done"
    lineage = LineageHome(folder=home, is_fresh=True)
    imported = record_base(lineage.ledger, str(folder), store=lineage.store)
    made = record(bench, home, job, home / "batches" / "tuned", {}, parents={str(folder): imported})
    shutil.rmtree(folder)

    report = made.reproduced()

    assert report.is_equal, report.sentences()


def lose_files(made, name):
    home = LineageHome(folder=made.home, is_fresh=True)
    shutil.rmtree(home.model_dir(home.find(name)))
    shutil.rmtree(made.home / "tensors", ignore_errors=True)


def test_a_changed_row_is_named_before_anything_trains(made_once):
    notices = []
    write_rows(made_once.rows, changed=5)

    assert made_once.reproduced(is_dry_run=True, notice=notices.append) is None

    write_rows(made_once.rows)
    (cause,) = [each for each in notices if "the data has changed" in each]
    assert "1 rows of training gone" in cause or "1 rows of held_out gone" in cause


def test_a_changed_record_is_named_field_by_field(made_once):
    changed = {"name": "sgd", "lr": 0.2}
    with rewritten(made_once, TRAINING, lambda value: {**value, "job": {**value["job"], "optimizer": changed}}):
        report = made_once.reproduced(share=0.05)

    assert not report.is_equal
    assert report.causes == ("the recorded job was changed after the training: optimizer.lr is 0.2 and was 0.1",)


def test_a_changed_chain_is_refused(made_once):
    def forge(value):
        value["links"][1]["environment"]["num_threads"] += 1
        return value

    with (
        rewritten(made_once, CHAIN, forge),
        pytest.raises(InputError, match="was changed after it was recorded"),
    ):
        made_once.reproduced()


@contextmanager
def rewritten(made, path, change):
    """Within the context, the JSON of an artifact of the model's run is changed."""
    before = made.ledger.read_text(made.run_id, path)
    made.rewrite(path, change)
    yield
    made.ledger.write_text(made.run_id, path, before)


def flip_a_bit(root, step, *, draw):
    """Flips a bit of a weight in a checkpoint, with checksums that hide it, as a fault of the memory would."""
    place, name = LocalStorage(root), f"step-{step:08d}"
    manifest = read_manifest(place, name)
    (file,) = manifest.files
    path = root / name / file
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    tensors = json.loads(content[8:header])
    tensor = draw.choice(sorted(each for each in tensors if each.startswith("model/")))
    first, last = tensors[tensor]["data_offsets"]
    # Of a mantissa: a change of an exponent would be as large as the weight, and easier to find.
    content[header + first + draw.randrange((last - first) // 4) * 4 + 1] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    from hashlib import sha256

    files = {file: CheckpointFile(num_bytes=len(content), sha256=sha256(content).hexdigest())}
    (root / name / MANIFEST).write_bytes(stored_manifest(replace(manifest, files=files)))
    return tensor


def skip_a_step(root, step):
    """Makes the checkpoint of a step into that of the next one, whose update was left out."""
    manifest = read_manifest(LocalStorage(root), f"step-{step:08d}")
    folder = (root / f"step-{step:08d}").rename(root / f"step-{step + 1:08d}")
    (folder / MANIFEST).write_bytes(stored_manifest(replace(manifest, step=step + 1)))


SINGLE_4 = Layout("single", 1, {"micro_batch": 4})
PLANTED = ("bit", "skipped step", "learning rate", "row")


CASES = [(planted, draw) for planted in PLANTED for draw in range(13)]


@pytest.mark.parametrize(
    ("planted", "draw"),
    matrix(CASES, quick=[("bit", 0)], ids=lambda case: f"{case[0]}-{case[1]}"),
)
def test_a_planted_change_is_found_where_it_was_planted(bench, home, tmp_path, planted, draw):
    random_ = random.Random(f"{planted} {draw}")
    rows = write_rows(tmp_path / "rows.jsonl")
    job = job_of(bench, rows)
    segment = random_.randrange(2)  # after which link

    def between(step, root):
        if step == LINKS[segment] and planted == "bit":
            flip_a_bit(root, step, draw=random_)
        if step == LINKS[segment] and planted == "skipped step":
            skip_a_step(root, step)

    if planted == "learning rate":  # the job that trained is not the one of the record
        made = train(bench, home, replace(job, optimizer=replace(job.optimizer, lr=0.11)))
        made.rewrite(CHAIN, lambda value: forged(value, job=to_json(job)))
        made.rewrite(TRAINING, lambda value: {**value, "job": to_json(job)})
        segment = -1
    elif planted == "row":
        write_rows(rows, changed=random_.randrange(60))
        made = train(bench, home, job)
        write_rows(rows)
        segment = None  # the row may be of any step
    else:
        made = train(bench, home, job, between=between)

    report = made.reproduced()

    assert not report.is_equal
    assert report.causes
    if segment is not None:
        first = 0 if segment == -1 else LINKS[segment]
        assert (report.first.link.first_step, report.first.link.step) == (first, LINKS[segment + 1])
        # A bit of a token that no step reads again changes no loss.
        assert report.first_step is None or first < report.first_step <= LINKS[segment + 1] + 1
        assert report.first.tensors


def forged(value, *, job):
    """A chain whose job was replaced, with all digests made anew."""
    from ringmaster.techniques.checkpoints.chain import StateChain

    chain = StateChain.parse(json.dumps(value))
    result = replace(chain, job=job, links=())
    for link in chain.links:
        result = result.add(replace(link, parent=result.head))
    return json.loads(result.to_text())


def test_a_model_whose_files_were_changed_is_told_from_one_that_trained_otherwise(made_once):
    lineage = LineageHome(folder=made_once.home, is_fresh=True)
    file = lineage.model_dir(lineage.find(made_once.name)) / "model.safetensors"
    original, weights = file.read_bytes(), load_file(file)
    name = sorted(weights)[0]
    weights[name] = weights[name].copy()
    weights[name].flat[0] += 1e-3
    file.unlink()
    save_file(weights, file, metadata={"format": "pt"})

    report = made_once.reproduced()

    file.write_bytes(original)
    assert report.files == (name,)
    assert report.first is None
    assert report.causes[-1].startswith("the model's files were changed after its training")


def test_an_audit_repeats_some_links_and_says_its_odds(made_once):
    report = made_once.reproduced(share=0.05)

    assert report.is_equal
    assert len(report.links) == 1
    assert report.probability == pytest.approx(1 / 3)
    assert "probability of 33%" in report.sentences()[0]


def test_what_cannot_be_made_again_says_so_before_it_starts(made_once, tmp_path):
    made, home = made_once, made_once.home
    with pytest.raises(InputError, match="other layouts than its own give other bits"):
        made.reproduced(technique="single")

    lineage = LineageHome(folder=home, is_fresh=True)
    old = lineage.ledger.start_job(lineage.ledger.start_batch("b", params={}), "old", params={})
    lineage.ledger.record_model("old", run_id=old, folder=home / "batches" / made.name / "model", kind="pretrained")
    lineage = LineageHome(folder=home, is_fresh=True)
    with pytest.raises(InputError, match="recorded without its job, by an earlier release"):
        reproduce(lineage, lineage.find("old"), ReproductionOptions(folder=tmp_path / "x"), notice=print)


def test_the_command_says_what_it_would_do_and_exits_by_the_result(made_once):
    runner, name = CliRunner(), made_once.name

    dry = runner.invoke(cli.app, ["reproduce", name, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "9 steps would be trained again (Single on 1), and 3 of its 3 recorded states" in " ".join(
        dry.stderr.split()
    )

    done = runner.invoke(cli.app, ["reproduce", name, "--json", "--share", "0.05"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["states"][0] in LINKS

    with rewritten(made_once, TRAINING, lambda value: {**value, "job": {**value["job"], "num_steps": 8}}):
        assert runner.invoke(cli.app, ["reproduce", name, "--share", "0.05"]).exit_code == 1
