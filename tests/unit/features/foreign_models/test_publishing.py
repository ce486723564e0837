"""`ringmaster export --push`: a commit on a hub, with a card of the model's lineage; what would leak is refused."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from safetensors.numpy import load
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ringmaster.errors import InputError, RingmasterError
from ringmaster.flows.cli import app
from ringmaster.model_lineage import DatasetInput, Ledger, Origin
from tests.integration.lineage.family import in_home
from tests.unit.features.foreign_models.stand_in_hub import TOKEN, Repository, stand_in_hub
from tests.unit.features.foreign_models.tiny_models import save

CARD = "---\nlicense: other\nlicense_name: acme-1\nlicense_link: https://acme.example/license\n---\n# Base\n"
MEASURED = {
    "metric": "accuracy",
    "slice": "all",
    "num_rows": 256,
    "value": 0.91,
    "low": 0.87,
    "high": 0.94,
    "level": 0.95,
}


@pytest.fixture
def hub(monkeypatch):
    with stand_in_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with an imported base, a model tuned from it, a LoRA on it, and one on a base that no hub has."""
    peft = pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("publishing")
    home = root / "home"
    with in_home(home):
        ledger = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
        batch = ledger.start_batch("night", batch="night", params={})
        save(root / "base", "llama")
        (root / "base" / "README.md").write_text(CARD)
        on_base = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(root / "base"), peft.LoraConfig(r=4, task_type="CAUSAL_LM")
        )
        on_base.save_pretrained(root / "lora")

        def record(name, folder, kind, parents=(), **origin):
            run = ledger.start_job(batch, name, params={})
            ledger.write_table(run, "evaluation/metrics.json", [MEASURED, {**MEASURED, "slice": "short"}])
            data = [
                DatasetInput(name="reviews", digest="d1", source=str(root / "reviews.csv"), num_rows=64),
                DatasetInput(name=str(root / "held" / "out.csv"), digest="d2", source="x", context="evaluation"),
                DatasetInput(name="acme/web", digest="d3", source="hf://acme/web@abc"),
            ]
            return ledger.record_model(
                name,
                run_id=run,
                folder=folder,
                kind=kind,
                parents=[parent.uri for parent in parents],
                datasets=data if parents else [],
                params={"optimizer.lr": 0.1, "data.path": str(root / "reviews.csv")},
                metrics={"accuracy": 0.9},
                origin=Origin(job=name, seed=3, num_steps=40, code_version="git abc", **origin),
            )

        base = record("base", root / "base", "imported", source="acme/base")
        own = record("own", root / "base", "pretrained")
        record("tuned", root / "base", "fine-tuned", [base], technique="fsdp x2")
        record("lora", root / "lora", "lora", [base])
        record("lora-on-own", root / "lora", "lora", [own])
        yield root


def push(*arguments):
    done = CliRunner().invoke(app, ["export", *map(str, arguments), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout), done.stderr


def test_a_model_is_one_private_commit_with_the_card_of_its_lineage(hub, home):
    answer, said = push("tuned", "--push", "org/tuned")
    repository = hub.repositories["org/tuned"]
    assert repository.private and repository.commits == ["tuned/1, by Ringmaster"]
    assert answer["url"] == f"{hub.url}/org/tuned" and answer["is_private"] and len(answer["commit"]) == 40
    assert set(repository.files) == {path.name for path in (home / "base").iterdir()}
    stored = load((home / "base" / "model.safetensors").read_bytes())
    assert (load(repository.files["model.safetensors"])["lm_head.weight"] == stored["lm_head.weight"]).all()
    text = repository.files["README.md"].decode()
    assert hub.cards == [text]
    card = ModelCard(text)
    data = card.data
    assert (data.license, data["license_name"], data["license_link"]) == (
        "other",
        "acme-1",
        "https://acme.example/license",
    )
    assert (data.base_model, data["base_model_relation"], data.pipeline_tag) == (
        "acme/base",
        "finetune",
        "text-generation",
    )
    assert (data["library_name"], data.tags, data.datasets) == (
        "transformers",
        ["ringmaster", "fine-tuned"],
        ["acme/web"],
    )
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_revision) == ("accuracy", 0.91, "d2")
    assert result.metric_args == {"low": 0.87, "high": 0.94, "level": 0.95, "num_rows": 256}
    for line in ("acme-1, of acme/base", "technique: fsdp x2", "steps: 40", "seed: 3", "code: git abc", "lr: 0.1"):
        assert line in card.text
    assert "accuracy: 0.91 (95% interval 0.87 to 0.94, 256 rows)" in card.text
    assert "training: reviews, digest `d1`" in card.text and "held/out.csv, digest `d2`" in card.text
    assert TOKEN not in json.dumps(answer) + said


def test_no_place_of_this_machine_is_published(hub, home):
    push("lora", "--push", "me/lora")
    files = hub.repositories["me/lora"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "acme/base"
    for name, content in files.items():
        assert str(home).encode() not in content, name
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert (head["library_name"], head["base_model"], head["base_model_relation"]) == ("peft", "acme/base", "adapter")


def test_a_merged_adapter_is_a_whole_model(hub, home):
    push("lora", "--merge", "--push", "me/merged")
    files = hub.repositories["me/merged"].files
    assert "adapter_config.json" not in files and "model.safetensors" in files
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert (head["library_name"], head["base_model_relation"]) == ("transformers", "finetune")


def test_an_adapter_on_a_base_that_the_hub_lacks_is_refused_before_a_repository_is_made(hub, home):
    with pytest.raises(InputError, match=r"which the hub does not have\. To fix: --merge"):
        push("lora-on-own", "--push", "me/lora")
    assert not hub.repositories


def test_weights_of_an_earlier_version_are_removed_and_other_files_stay(hub, home, tmp_path):
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.txt": b"mine"}
    hub.repositories["me/tuned"] = Repository(private=True, files=dict(old))
    answer, _ = push("tuned", tmp_path / "copy", "--push", "me/tuned")
    files = hub.repositories["me/tuned"].files
    assert answer["removed"] == ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert "notes.txt" in files and not set(answer["removed"]) & set(files)
    assert (tmp_path / "copy" / "README.md").read_bytes() == files["README.md"]


def test_a_merged_model_does_not_stay_an_adapter_by_a_file_of_an_earlier_version(hub, home):
    push("lora", "--push", "me/lora")
    answer, _ = push("lora", "--merge", "--push", "me/lora")
    assert answer["removed"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert "model.safetensors" in hub.repositories["me/lora"].files


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_published(hub, home, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is there already"):
        push("tuned", tmp_path / "there", "--push", "me/tuned")
    with pytest.raises(InputError, match="is not a folder"):
        push("tuned", tmp_path / "file" / "x", "--push", "me/tuned")
    assert not hub.repositories
    push("tuned", tmp_path / "new" / "copy", "--push", "me/tuned")
    assert (tmp_path / "new" / "copy" / "config.json").is_file()


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [("hub.example", "HF_ENDPOINT: 'hub.example' is no URL of a hub"), ("http://me:secret@127.0.0.1:9", "not answer")],
)
def test_an_endpoint_that_is_no_hub_is_named_without_its_password(home, monkeypatch, endpoint, reason):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(RingmasterError, match=reason) as error:
        push("tuned", "--push", "me/tuned")
    assert "secret" not in str(error.value)


def test_nothing_private_goes_to_a_public_repository_unless_asked(hub, home):
    hub.repositories["me/tuned"] = Repository(private=False)
    with pytest.raises(InputError, match=r"is public, and so would this model be\. To fix: give --public"):
        push("tuned", "--push", "me/tuned")
    assert not hub.repositories["me/tuned"].commits
    assert push("tuned", "--push", "me/tuned", "--public")[0]["is_private"] is False
    push("tuned", "--push", "me/other", "--public")
    assert not hub.repositories["me/other"].private


@pytest.mark.parametrize(
    ("repo", "change", "reason"),
    [
        ("tuned", {}, "'tuned' is no name of a repository. To fix: write OWNER/NAME"),
        ("me/a b", {}, "To fix: write OWNER/NAME"),
        ("you/tuned", {}, "the token is of me, org, and not of you"),
        ("me/tuned", {"may_write": False}, "You don't have the rights to create a model"),
        ("me/tuned", {"card_faults": [{"message": '"license" must be one of'}]}, '"license" must be one of'),
    ],
)
def test_what_the_hub_would_refuse_is_an_error_of_one_line(hub, home, repo, change, reason):
    vars(hub).update(change)
    with pytest.raises(InputError) as error:
        push("tuned", "--push", repo)
    assert reason in str(error.value) and "\n" not in str(error.value) and TOKEN not in str(error.value)
    assert not any(repository.commits for repository in hub.repositories.values())


def test_without_a_token_and_with_a_wrong_one_it_says_how_to_log_in(hub, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match=r"Invalid user token.*To fix: hf auth login") as error:
        push("tuned", "--push", "me/tuned")
    assert "hf_wrong" not in str(error.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "none"))
    with pytest.raises(InputError, match=r"there is no token for the hub\. To fix: hf auth login"):
        push("tuned", "--push", "me/tuned")
    assert not hub.repositories


def test_a_hub_that_does_not_answer_is_an_error_with_a_remedy(home, monkeypatch):
    with stand_in_hub() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(RingmasterError, match="try again when it answers, or correct HF_ENDPOINT") as error:
        push("tuned", "--push", "me/tuned")
    assert not isinstance(error.value, InputError)


def test_a_folder_and_public_belong_together_with_push(home, tmp_path):
    with pytest.raises(
        InputError, match=r"there is no folder to write\. To fix: name a folder, or a repository by --push"
    ):
        push("tuned")
    with pytest.raises(InputError, match="--public is of --push"):
        push("tuned", tmp_path / "x", "--public")


def test_the_command_reads_the_endpoint_and_the_token_of_the_environment(hub, home, tmp_path):
    save(tmp_path / "folder", "qwen2")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    call = [sys.executable, "-c", "from ringmaster.flows.entry import main; main()", "export", "folder"]
    done = subprocess.run(
        [*call, "--push", "me/folder"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"in the private repository {hub.url}/me/folder" in " ".join(done.stderr.split())
    assert TOKEN not in done.stdout + done.stderr
    assert "# folder" in hub.repositories["me/folder"].files["README.md"].decode()
