"""Signed versions: whoever changes a file, the signature, the statement or a record of a model is found out."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ringmaster.errors import InputError, SignatureError
from ringmaster.flows import cli
from ringmaster.flows.batch.run_folder import base_weights
from ringmaster.model_lineage import QUIET_ENVIRONMENT, DatasetInput, Ledger, Origin, signatures
from ringmaster.model_lineage.ledger.families import SIGNED
from ringmaster.model_lineage.signatures import SIGNATURE, STATEMENT, SigningKeys
from ringmaster.tasks.batch import Batch
from ringmaster.techniques import DataSpec, Job, ModelSpec
from tests.integration.lineage.family import in_home, run
from tests.matrix import matrix

pytest.importorskip("model_signing")


def make_key(folder, name="release"):
    """Makes a key the new signing key of a folder, and trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "trusted").mkdir(parents=True, exist_ok=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "signing.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "trusted" / f"{name}.pem").write_bytes(public)
    return folder


def write_model(folder, *, value):
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "hooks").write_text("what a signature ignores by default")
    (folder / "config.json").write_text(json.dumps({"value": value}))
    weights = np.random.default_rng(value).standard_normal((40, 50)).astype(np.float32)
    save_file({"weight": weights}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    make_key(home / "keys")
    with in_home(home):
        yield home


@pytest.fixture(scope="module")
def ledger(home):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET_ENVIRONMENT.items():
            patch.setenv(name, value)
        keys = SigningKeys(home / "keys")
        yield Ledger(
            f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts", tensors=home / "tensors", keys=keys
        )


def record_model(ledger, name, folder, **changes):
    batch = ledger.start_batch("night", batch="night", params={})
    job = ledger.start_job(batch, name, params={})
    ledger.write_text(batch, "plan-1/plan.json", '{"makespan_s": 7}')
    ledger.write_text(job, "training/chain.json", '{"links": []}')
    data = DatasetInput(name="reviews", digest="d1", source="/data/reviews.jsonl", num_rows=90)
    origin = Origin(job=name, batch_run_id=batch, plan="plan-1/plan.json", code_version="git 0123abc", seed=3)
    facts = {
        "kind": "pretrained",
        "datasets": [data],
        "params": {"lr": 0.1},
        "metrics": {"loss": 1.5},
        "origin": origin,
    }
    return ledger.record_model(name, run_id=job, folder=folder, **{**facts, **changes})


@pytest.fixture(scope="module")
def base(ledger, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("base") / "model", value=1)
    record = record_model(ledger, "base", folder)
    ledger.keep_tensors(record, folder, store=ledger.store)
    return ledger.resolve_model(record.uri)


@pytest.fixture(scope="module")
def tuned(ledger, base, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tuned") / "model", value=2)
    return record_model(ledger, "tuned", folder, kind="fine-tuned", parents=[base.model_id])


def test_a_signature_proves_files_records_and_materials(ledger, base, tuned):
    proof = ledger.verify(tuned)
    assert (proof.key, proof.num_files) == ("release", 5)  # with the card, the statement, and what lies under .git
    materials = {each["name"]: each["digest"] for each in proof.materials()}
    assert materials[f"base: {base.uri}"] == {"sha256": ledger.verify(base).digest}
    assert materials["data: reviews"] == {"ringmaster": "d1"}
    assert materials["code: git 0123abc"] == {"gitCommit": "0123abc"}
    assert {"plan-1/plan.json", "training/chain.json"} <= {*materials}
    code, shown, said = run_command("verify", "tuned")
    assert code == 0, said
    assert "tuned/1 is signed by the key release: 5 files" in shown
    assert "made from base: models:/base/1: sha256" in shown


def run_command(*arguments):
    """Runs a command that is not a command of `lineage`."""
    from typer.testing import CliRunner

    from ringmaster.flows import cli

    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_openssfs_own_program_verifies_it(ledger, home, tuned, tmp_path):
    from click.testing import CliRunner
    from model_signing._cli import main

    folder = ledger.download_model(tuned.uri, tmp_path)
    signature, key = folder / SIGNATURE, home / "keys" / "trusted" / "release.pem"
    arguments = ["verify", "key", str(folder), "--signature", str(signature), "--public_key", str(key)]
    done = CliRunner().invoke(main, [*arguments, "--no-ignore-git-paths"])
    assert done.exit_code == 0, done.output


def changed_file(draw, folder):
    """Changes one file of a model, in one of the ways in which files change."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    match draw.choice(["bit", "bit", "byte", "cut", "longer", "removed", "renamed", "added", "swapped"]):
        case "bit":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        case "byte":
            at = draw.randrange(len(content))
            content[at] = (content[at] + draw.randrange(1, 256)) % 256
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[: draw.randrange(len(content))])
        case "longer":
            file.write_bytes(content + draw.randbytes(draw.randrange(1, 9)))
        case "removed":
            file.unlink()
        case "renamed":
            file.rename(file.with_name(f"{file.name}.old"))
        case "added":
            added = folder / draw.choice(["pickle.bin", ".gitignore", ".git/config", "deep/model.py", "README.txt"])
            added.parent.mkdir(exist_ok=True)
            added.write_bytes(draw.randbytes(9))
        case "swapped":
            other = draw.choice([each for each in files if each != file])
            first, second = file.read_bytes(), other.read_bytes()
            file.write_bytes(second)
            other.write_bytes(first)
    return file


def changed_statement(draw, folder):
    """Changes a value of the statement, or of what the signature says, as valid JSON."""
    file = folder / draw.choice([STATEMENT, SIGNATURE])
    content = json.loads(file.read_text())
    places = list(_places(content))
    holder, key = draw.choice(places)
    value = holder[key]
    holder[key] = value + 1 if isinstance(value, int | float) else f"{value}x" if isinstance(value, str) else "x"
    file.write_text(json.dumps(content))


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield value, key
        yield from _places(each)


@pytest.mark.parametrize("num_changes", matrix([100, 1000], quick=[100]))
def test_changes_of_files_and_statements_are_all_found(ledger, home, tuned, tmp_path, num_changes):
    original = ledger.download_model(tuned.uri, tmp_path)
    digest = ledger.client.get_logged_model(tuned.model_id).tags[SIGNED]
    keys, draw = SigningKeys(home / "keys"), random.Random(0)
    signatures.verify(original, keys, signature_digest=digest)
    for number in range(num_changes):
        copy = tmp_path / "copy"
        shutil.copytree(original, copy)
        (changed_file if number % 2 else changed_statement)(draw, copy)
        with pytest.raises(SignatureError):
            signatures.verify(copy, keys, signature_digest=digest)
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json has the SHA-256 44136fa355b3..., not "),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "more.txt").write_text("more"), "more.txt was added"),
    ],
)
def test_a_changed_file_is_named_with_its_model(ledger, home, tuned, tmp_path, monkeypatch, change, what):
    folder = ledger.download_model(tuned.uri, tmp_path)
    change(folder)
    monkeypatch.setattr(ledger, "_downloaded", lambda model, to, path: folder)
    with pytest.raises(SignatureError) as caught:
        ledger.verify(tuned)
    assert str(caught.value).startswith(f"{tuned.uri} is not what was signed: {what}")
    assert str(tmp_path) not in str(caught.value) and "b'" not in str(caught.value)


RECORDS = {
    "ringmaster.kind": "lora",
    "ringmaster.parents": "[]",
    "ringmaster.datasets": "[]",
    "ringmaster.origin": '{"seed": 4}',
    "ringmaster.name": "other",
    SIGNED: "0" * 64,
}


@pytest.mark.parametrize("tag", RECORDS)
def test_a_changed_record_is_found(ledger, tuned, tag):
    before = ledger.client.get_logged_model(tuned.model_id).tags[tag]
    ledger.client.set_logged_model_tags(tuned.model_id, {tag: RECORDS[tag]})
    try:
        with pytest.raises(SignatureError, match=r"recorded|records"):
            ledger.verify(tuned)
    finally:
        ledger.client.set_logged_model_tags(tuned.model_id, {tag: before})
    ledger.verify(tuned)


def test_a_changed_plan_or_base_is_found(ledger, base, tuned):
    batch = tuned.origin.batch_run_id
    ledger.write_text(batch, "plan-1/plan.json", '{"makespan_s": 6}')
    with pytest.raises(SignatureError, match=r"plan-1/plan.json is not what it was made from"):
        ledger.verify(tuned)
    ledger.write_text(batch, "plan-1/plan.json", '{"makespan_s": 7}')
    ledger.verify(tuned)


def test_keys_are_rotated_and_revoked(ledger, home, tuned, tmp_path):
    keys = home / "keys"
    old = (keys / "signing.pem").read_bytes()
    make_key(keys, "next")
    newer = record_model(ledger, "newer", write_model(tmp_path / "model", value=3))
    assert (ledger.verify(newer).key, ledger.verify(tuned).key) == ("next", "release")
    (keys / "revoked").mkdir()
    (keys / "trusted" / "next.pem").rename(keys / "revoked" / "next.pem")
    with pytest.raises(SignatureError, match="by the key next, which was revoked"):
        ledger.verify(newer)
    (keys / "revoked" / "next.pem").unlink()
    with pytest.raises(SignatureError, match="by an unknown key"):
        ledger.verify(newer)
    (keys / "signing.pem").write_bytes(old)


def test_the_policy_asks_for_signatures(ledger, home, base, tmp_path):
    unsigned = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts", tensors=home / "tensors")
    plain = record_model(unsigned, "plain", write_model(tmp_path / "model", value=4))
    unsigned.keep_tensors(plain, tmp_path / "model", store=unsigned.store)
    policy = home / "keys" / "policy.yaml"
    policy.write_text("require_signature: [promote, restore, base, evaluate]\n")
    try:
        with pytest.raises(SignatureError, match="was not signed when it was recorded"):
            ledger.check_use(plain, "base")
        ledger.check_use(base, "base", folder=ledger.download_model(base.uri, tmp_path / "cache"))
        code, _, said = run("restore", "plain", tmp_path / "refused")
        assert (code, "was not signed" in said, (tmp_path / "refused").exists()) == (2, True, False)
        code, _, said = run("restore", "base", tmp_path / "restored")
        assert code == 0, said
        with pytest.raises(SignatureError, match=r"model.safetensors differ from what was signed"):
            copy = ledger.download_model(base.uri, tmp_path / "other")
            (copy / "model.safetensors").write_bytes(b"other")
            ledger.check_use(base, "evaluate", folder=copy)
        policy.write_text("require_signature: everything\n")
        with pytest.raises(InputError, match="does not say what must be verified"):
            ledger.check_use(base, "promote")
    finally:
        policy.unlink()


@pytest.fixture
def unsigned(home, ledger, tmp_path):
    """A version that was recorded without a key, in a home whose policy asks for signatures everywhere."""
    recorder = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts", tensors=home / "tensors")
    name = f"unsigned-{tmp_path.name[-12:]}".replace("_", "-")
    record_model(recorder, name, write_model(tmp_path / "model", value=5))
    policy = home / "keys" / "policy.yaml"
    policy.write_text("require_signature: [promote, restore, base, evaluate]\n")
    yield name
    policy.unlink()


@pytest.mark.parametrize(
    "command",
    [("promote", "{}/1", "--why", "it looks good"), ("evaluate", "{}/1", "--data", "digits")],
    ids=lambda command: command[0],
)
def test_commands_refuse_a_version_without_the_signature_that_the_policy_asks_for(unsigned, command):
    done = CliRunner().invoke(cli.app, [word.format(unsigned) for word in command])

    assert done.exit_code != 0
    message = done.output + done.stderr + str(done.exception)
    assert f"{unsigned}/1 was not signed when it was recorded" in message


def test_a_batch_refuses_a_base_without_the_signature_that_the_policy_asks_for(unsigned, ledger, tmp_path):
    job = Job(name="a", base=f"models:/{unsigned}/1", model=ModelSpec(architecture="X"), data=DataSpec(source="digits"))
    batch = Batch(name="b", jobs=(job,), folder=tmp_path, text="")

    with pytest.raises((InputError, SignatureError), match="was not signed when it was recorded"):
        base_weights(batch, ledger, None, tmp_path / "home")


def test_a_key_that_signs_nothing_is_told(home, tmp_path):
    key = tmp_path / "signing.pem"
    key.write_text("no key")
    with pytest.raises(SignatureError, match=r"signs nothing: .*To fix: make it by `openssl"):
        signatures.sign({"a": Path(__file__)}, key=key, recorded={}, materials=[])


@pytest.mark.parametrize("content", ["[1]", "not JSON", '{"tensors": {}}'])
def test_a_changed_reference_is_told_with_its_model_and_file(ledger, base, home, content):
    (file,) = [each for each in home.rglob("*.stored") if base.model_id in str(each)]
    before = file.read_bytes()
    file.write_text(content)
    try:
        with pytest.raises(SignatureError) as caught:
            ledger.verify(base)
    finally:
        file.write_bytes(before)
    assert base.uri in str(caught.value) and "model.safetensors" in str(caught.value)
    assert "b'" not in str(caught.value) and "/tmp" not in str(caught.value).replace(str(home), "")
    ledger.verify(base)
