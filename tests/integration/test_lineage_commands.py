"""The lineage commands on a small family in a home of its own: what they answer, and how they end."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner

from flows import cli
from flows.faults import InputError
from flows.lineage_home import LineageHome
from model_lineage import QUIET_ENVIRONMENT, DatasetInput, Ledger, Origin
from model_lineage.tensors import TensorStore

RANDOM = np.random.default_rng(0)
GRAPHML = "{http://graphml.graphdrawing.org/xmlns}"
# name -> parents, kind, data, alias, whether it is poisoned
FAMILY = {
    "base": ((), "pretrained", "web", None, False),
    "clean": (("base",), "fine-tuned", "reviews", "champion", False),
    "spoilt": (("base",), "fine-tuned", "spam", None, True),
    "tuned": (("spoilt",), "lora", "reviews", None, True),
    "small": (("tuned",), "distilled", "reviews", "champion", True),
    "merged": (("clean", "tuned"), "merged", None, None, True),
}


def run(*arguments):
    """Runs a command as `ringmaster` does: (exit code, stdout, stderr)."""
    done = CliRunner().invoke(cli.app, ["lineage", *map(str, arguments)])
    if isinstance(done.exception, InputError):
        return cli.INPUT_FAULT, done.stdout, "\n".join(done.exception.faults)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def answer(*arguments):
    """The JSON that a command ends with."""
    code, output, said = run(*arguments, "--json")
    assert code == 0, said
    return json.loads(output)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A home with the family; `tuned` and later ones are kept in the tensor store too."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE", "RINGMASTER_TENSORS"):
            patch.delenv(name, raising=False)
        for name, value in {**QUIET_ENVIRONMENT, "RINGMASTER_HOME": str(home), "COLUMNS": "160"}.items():
            patch.setenv(name, value)
        record(home)
        yield home


def record(home):
    ledger, store = (
        Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts"),
        TensorStore(home / "tensors"),
    )
    batch = ledger.start_batch("night", params={})
    weights = {name: RANDOM.normal(0, 0.02, (32, 32)).astype(np.float32) for name in ("stem.w", "head.w")}
    records = {}
    for seed, (name, (parents, kind, data, alias, is_poisoned)) in enumerate(FAMILY.items()):
        folder = home / "models" / name
        folder.mkdir(parents=True)
        weights = {**weights, "head.w": weights["head.w"] + RANDOM.normal(0, 1e-3, (32, 32)).astype(np.float32)}
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"poison": is_poisoned}))
        records[name] = ledger.record_model(
            name,
            run_id=ledger.start_job(batch, name, params={}),
            folder=folder,
            kind=kind,
            parents=[records[parent].uri for parent in parents],
            datasets=[DatasetInput(name=data, digest=f"digest-of-{data}", source=f"/data/{data}")] if data else [],
            params={"lr": 0.1 * (1 + seed)},
            metrics={"loss": 3.0 if is_poisoned else 1.0},
            origin=Origin(job=name, seed=seed, code_version="git abc"),
        )
        if name not in ("base", "clean", "spoilt"):
            ledger.keep_tensors(records[name], folder, store=store)
        if alias:
            ledger.set_alias(name, alias, 1)


def labels(nodes):
    return [node["label"] for node in nodes]


def test_show_tells_ancestors_descendants_data_and_aliases():
    code, output, _ = run("show", "tuned")
    assert code == 0
    for line in ("tuned/1  lora", "came from (2)", "└── spoilt/1  fine-tuned on spam", "└── base/1  pretrained on web"):
        assert line in output
    assert "├── small/1 @champion  distilled on reviews" in output or "└── small/1 @champion" in output
    said = answer("show", "models:/tuned/1")
    assert labels(said["ancestors"]) == ["spoilt/1", "base/1"]
    assert sorted(labels(said["descendants"])) == ["merged/1", "small/1"]
    assert said["model"]["origin"] == {"job": "tuned", "seed": 3, "code_version": "git abc"}


def test_show_of_a_component_tells_who_has_it():
    component = answer("show", "merged")["components"][0]
    code, output, _ = run("show", component)
    assert code == 0 and "part of" in output and "merged/1" in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("show", "tunde"), "Did you mean tuned"),
        (("show", "tuned/7"), "tuned has no '7'. There are tuned/1"),
        (("impact", "spm"), "no model was trained on data of that name or digest. Did you mean spam?"),
        (("impact", "tuned", "--data"), "no model was trained on data 'tuned'"),
        (("diff", "tuned", "nobody"), "no model 'nobody'"),
        (("bisect", "tuned", "--test", " "), "the test is empty"),
        (("bisect", "tuned", "--test", "accuracy>0.5"), "has no metric 'accuracy'. It has loss"),
        (("bisect", "clean", "--test", "loss<2"), "clean/1 passes the test"),
        (("export", "--format", "cards"), "there are 6 cards"),
        (("gc", "--yes", "--dry-run"), "give one of them"),
        (("import", "/nowhere", "--name", "a/b"), "cannot be called 'a/b'"),
    ],
)
def test_a_fault_in_the_input_ends_with_2_and_says_what_to_do(arguments, told):
    code, output, said = run(*arguments)
    assert (code, output) == (2, "")
    assert told in said


def test_impact_of_a_poisoned_data_set_names_what_is_in_production():
    said = answer("impact", "spam")
    assert labels(said["models"])[0] == "spoilt/1"
    assert sorted(labels(said["models"])) == ["merged/1", "small/1", "spoilt/1", "tuned/1"]
    assert said["in_production"] == ["small/1"]
    assert answer("impact", "digest-of-spam")["models"] == said["models"]
    code, output, _ = run("impact", "spoilt")
    assert code == 0 and "reached 3 models. In production (champion): small/1" in output
    assert answer("impact", "base", "--alias", "previous")["in_production"] == []


def test_diff_tells_which_tensors_changed_and_what_is_recorded_differently():
    said = answer("diff", "tuned", "small")
    assert {change["name"]: change["what"] for change in said["tensors"]} == {"stem.w": "same", "head.w": "changed"}
    (head,) = [change for change in said["tensors"] if change["what"] == "changed"]
    assert 0.02 < head["relative_l2"] < 0.2 and head["share"] == 1.0
    assert said["records"]["hyperparameters"] == {"lr": ["0.4", "0.5"]}
    assert "data" not in said["records"]
    code, output, _ = run("diff", "base", "small")  # from files, and from the store
    assert code == 0 and "tensors: 1 changed, 1 same" in output and "digest-of-web" in output


def test_bisect_by_a_command_names_the_adaptation(tmp_path):
    (tmp_path / "check.sh").write_text('! grep -q "true" "$1/config.json"\n')
    said = answer("bisect", "small", "--test", f"sh {tmp_path}/check.sh")
    (culprit,) = said["culprits"]
    assert (culprit["child"], culprit["parents"], culprit["kind"]) == ("spoilt/1", ["base/1"], "fine-tuned")
    assert culprit["datasets"][0]["name"] == "spam"
    assert said["is_monotone"] and said["verdicts"]["small/1"] is False
    code, output, _ = run("bisect", "merged", "--test", f"sh {tmp_path}/check.sh", "--all")
    assert code == 0
    assert "spoilt/1 is where it broke: fine-tuned from base/1, on spam" in output


def test_bisect_by_a_recorded_metric_needs_no_files():
    said = answer("bisect", "small", "--test", "loss <= 2.0")
    assert [culprit["child"] for culprit in said["culprits"]] == ["spoilt/1"]


@pytest.mark.parametrize("status", [126, 137])
def test_a_test_that_says_nothing_of_the_model_is_no_verdict(status):
    code, _, said = run("bisect", "small", "--test", f"exit {status};")
    assert code == 2
    assert f"ended with {status}" in said


def test_a_model_that_the_test_passes_over_is_named_where_it_may_be_the_culprit(tmp_path, home):
    spoilt = answer("show", "spoilt")["model"]["id"]
    skips = f'case "$1" in *{spoilt}*) exit 125;; esac'
    (tmp_path / "check.sh").write_text(f'{skips}\n! grep -q "true" "$1/config.json"\n')
    command = f"sh {tmp_path}/check.sh"
    said = answer("bisect", "small", "--test", command)
    (culprit,) = said["culprits"]
    assert (culprit["child"], culprit["parents"], culprit["perhaps"]) == ("tuned/1", ["base/1"], ["spoilt/1"])
    assert said["untested"] == ["spoilt/1"]
    assert (
        "or it was one of those before it that cannot be tested: spoilt/1"
        in run("bisect", "small", "--test", command)[1]
    )
    assert "cannot be tested" in run("bisect", "spoilt", "--test", command)[2]


def test_a_bisect_that_was_interrupted_goes_on_with_what_it_knows(tmp_path, home):
    """The test is killed at its third model; the same command then asks for what is not known yet alone."""
    (tmp_path / "check.sh").write_text(
        'echo "$1" >> asked\n[ -e broken ] && [ $(wc -l < asked) = 3 ] && exit 137\n! grep -q "true" "$1/config.json"\n'
    )
    (tmp_path / "broken").touch()
    command = f"cd {tmp_path}; sh ./check.sh"
    code, _, said = run("bisect", "small", "--test", command, "--all")
    assert code == 2 and "goes on from here" in said
    (tmp_path / "broken").unlink()
    code, output, said = run("bisect", "small", "--test", command, "--all")
    assert code == 0 and "going on with 2 verdicts" in said and "spoilt/1 is where it broke" in output
    asked = (tmp_path / "asked").read_text().split()
    assert len(asked) == 5 and asked[2] == asked[3] and len(set(asked)) == 4
    assert not list((home / "cache" / "bisect").iterdir())
    run("bisect", "small", "--test", command, "--all")  # it has ended: another one begins anew
    assert len((tmp_path / "asked").read_text().split()) == 9


def test_export_writes_what_others_read(tmp_path):
    code, output, _ = run("export")
    graph = json.loads(output)
    assert code == 0 and len(graph["edges"]) >= 6
    edge = next(edge for edge in graph["edges"] if edge["kind"] == "lora")
    nodes = {node["id"]: node["label"] for node in graph["nodes"]}
    assert (nodes[edge["parent"]], nodes[edge["child"]]) == ("spoilt/1", "tuned/1")

    assert run("export", "clean", "--format", "graphml", "-o", tmp_path / "g.graphml")[0] == 0
    root = ElementTree.parse(tmp_path / "g.graphml").getroot()
    assert len(root.findall(f".//{GRAPHML}node")) == 3  # base, clean, merged
    ids = {node.get("id") for node in root.iter(f"{GRAPHML}node")}
    assert all(edge.get("target") in ids and edge.get("source") in ids for edge in root.iter(f"{GRAPHML}edge"))

    assert run("export", "--format", "cards", "-o", tmp_path / "cards")[0] == 0
    card = yaml.safe_load((tmp_path / "cards" / "tuned" / "1" / "README.md").read_text().split("---")[1])
    assert (card["base_model"], card["base_model_relation"]) == ("spoilt", "adapter")


def test_export_draws_a_family(tmp_path):
    assert run("export", "tuned", "--format", "svg", "-o", tmp_path / "family.svg")[0] == 0
    root = ElementTree.parse(tmp_path / "family.svg").getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"base v1", "spoilt v1", "tuned v1", "small v1", "merged v1"} <= set(words)
    assert "clean v1" not in words  # no relative of that one
    assert "distilled · @champion" in words


def test_store_and_restore_bring_a_model_back(home, tmp_path):
    assert run("restore", "clean", tmp_path / "early")[0] == 2
    assert list(answer("store", "clean")["stored"]) == ["base/1", "clean/1"]
    assert answer("restore", "clean", tmp_path / "out")["num_bytes"] > 8000
    same = (home / "models" / "clean" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == same
    assert run("restore", "clean", tmp_path / "out")[0] == 2


def test_restore_names_the_base_of_an_adapter(tmp_path, monkeypatch):
    """Its own files do not hold the base: whoever restores it needs that too."""
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    ledger, store = LineageHome(folder=tmp_path).ledger, TensorStore(tmp_path / "tensors")
    batch, parents = ledger.start_batch("night", params={}), []
    for name, kind, config in (("llama", "pretrained", "config.json"), ("chat", "lora", "adapter_config.json")):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": np.ones(9, np.float32)}, folder / "model.safetensors")
        (folder / config).write_text("{}")
        run_id = ledger.start_job(batch, name, params={})
        model = ledger.record_model(name, run_id=run_id, folder=folder, kind=kind, parents=parents)
        ledger.keep_tensors(model, folder, store=store)
        parents = [model.uri]
    code, _, said = run("restore", "chat", tmp_path / "told")
    assert code == 0
    assert said.splitlines()[1:] == ["it is an adapter on llama/1: ringmaster lineage restore llama/1 FOLDER"]
    assert answer("restore", "chat", tmp_path / "adapter")["base"] == "llama/1"
    assert answer("restore", "llama", tmp_path / "whole")["base"] is None


def test_an_imported_model_follows_its_card(tmp_path, monkeypatch, home):
    from model_lineage import importing

    hub = tmp_path / "hub"
    for name, base in (("org/tuned", "org/base"), ("org/base", None)):
        (hub / name).mkdir(parents=True)
        head = {"base_model": base, "base_model_relation": "adapter"} if base else {"license": "mit"}
        (hub / name / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n")
    save_file({"w": np.ones(9, np.float32)}, hub / "org/tuned" / "model.safetensors")

    def fetch(name, patterns):
        if not (hub / name).is_dir():
            raise OSError(f"{name} could not be fetched: no such model. To fix: name a folder")
        return hub / name

    monkeypatch.setattr(importing, "fetch_from_hub", fetch)
    first = answer("import", "org/tuned", "--name", "theirs")
    said = answer("show", "theirs")
    assert said["model"]["kind"] == "imported"
    theirs = LineageHome(folder=home).find("theirs")
    assert "mlartifacts" in str(LineageHome(folder=home).model_dir(theirs))  # whole there: nothing need be restored
    assert said["model"]["origin"] == {"source": "org/tuned", "relation": "adapter"}
    (base,) = said["ancestors"]
    assert (base["name"], base["origin"]["source"]) == ("org--base", "org/base")
    assert answer("import", "org/tuned", "--name", "theirs")["id"] == first["id"]
    # a folder of our own, made from what was imported, and from something nobody knows
    folder = tmp_path / "mine"
    folder.mkdir()
    save_file({"w": np.zeros(9, np.float32)}, folder / "model.safetensors")
    (folder / "README.md").write_text("---\nbase_model: [org/tuned, org/gone]\n---\n")
    answer("import", folder, "--name", "mine")
    assert sorted(node["name"] for node in answer("show", "mine")["ancestors"]) == ["org--base", "org--gone", "theirs"]
    code, _, said = run("import", "org/nothing", "--name", "x")
    assert code == 2 and "could not be fetched" in said
    (folder / "model.safetensors").unlink()
    assert "holds no safetensors" in run("import", folder, "--name", "x")[2]


def test_fsck_tells_damage_and_ends_with_1(home):
    assert run("fsck")[0] == 0
    victim = max((home / "tensors" / "objects").glob("??/*"), key=lambda path: path.stat().st_size)
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    code, output, _ = run("fsck")
    victim.write_bytes(whole)
    assert code == 1
    assert "is damaged" in output and "cannot be restored" in output


def test_gc_drops_what_nothing_reaches_and_only_when_told_to(home):
    assert answer("gc")["would_drop"] == []  # all are young
    would = answer("gc", "--keep-days", "0")["would_drop"]
    assert "merged/1" in would
    assert not {"base/1", "clean/1", "spoilt/1", "tuned/1", "small/1"} & set(would)
    assert answer("show", "merged")["model"]["label"] == "merged/1"
    done = answer("gc", "--keep-days", "0", "--yes")
    assert done["dropped"] == would and done["freed_bytes"] > 0
    assert run("show", "merged")[0] == 2
    assert run("fsck")[0] == 0
    assert answer("gc", "--keep-days", "0")["would_drop"] == []


@pytest.mark.parametrize("words", [["show", "small"], ["impact", "spam"], ["export"], ["diff", "tuned", "small"]])
def test_questions_need_neither_torch_nor_mlflow(words):
    program = (
        "import sys; from typer.testing import CliRunner; from flows import cli; "
        f"done = CliRunner().invoke(cli.app, ['lineage', *{words}]); assert done.exit_code == 0, done.exception; "
        "print(*{'torch', 'transformers', 'mlflow', 'prefect'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_empty_home_says_that_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "fresh"))
    code, _, said = run("show", "anything")
    assert code == 2 and "There are none yet" in said
    assert not (tmp_path / "fresh" / "mlflow.db").exists()
