"""Signatures of recorded models, in OpenSSF's format (package model-signing), with keys of one's own and no network.

A signature (`model.sig`) covers all files of a version, one of which is an in-toto statement of how it was made
(`provenance.json`: data, code, bases and plan by digest). The model's record has the digest of the signature, and the
statement has the record: who changes one of them is found by the other. docs/provenance.md describes the keys.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ringmaster.errors import InputError, SignatureError
from ringmaster.extras import require_extra
from ringmaster.files import sha256_of

SIGNATURE, STATEMENT = "model.sig", "provenance.json"
STATEMENT_TYPE, PREDICATE_TYPE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://github.com/ringmaster/ringmaster/docs/provenance.md#statement"
USES = ("promote", "restore", "base", "evaluate")


@dataclass(frozen=True, kw_only=True)
class SignatureProof:
    """What a verified signature proves.

    key: the name of the trusted key.
    num_files: the number of files that it covers, with the statement.
    digest: the SHA-256 over the files' digests, by which other statements name this model.
    statement: the in-toto statement.
    """

    key: str
    num_files: int
    digest: str
    statement: Mapping[str, Any]

    def recorded(self) -> Mapping[str, Any]:
        """Returns what was recorded of the model when it was signed."""
        result: Mapping[str, Any] = self.statement["predicate"]["buildDefinition"]["externalParameters"]
        return result

    def materials(self) -> Sequence[Mapping[str, Any]]:
        """Returns what the model was made from: entries with a name, and a digest where it is known."""
        result: Sequence[Mapping[str, Any]] = self.statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        return result

    def check(self, folder: Path) -> None:
        """Raises SignatureError where a folder has other files than those that were signed, or lacks weights."""
        signed = {each["name"]: each["digest"]["sha256"] for each in self.statement["subject"]}
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        here = {name: sha256_of(path) for name, path in files.items() if name not in (SIGNATURE, STATEMENT)}
        lost = [name for name in signed if name not in here and name.endswith(".safetensors")]
        if differing := [*lost, *(name for name, digest in here.items() if signed.get(name) != digest)]:
            raise SignatureError(
                f"{folder}: {', '.join(differing)} differ from what was signed. To fix: remove the folder"
            )


@dataclass(frozen=True)
class SigningKeys:
    """The folder `keys` of a home: `signing.pem`, `trusted/*.pem`, `revoked/*.pem`, and `policy.yaml`."""

    folder: Path

    @property
    def private(self) -> Path | None:
        """The key with which versions are signed, or None where they are not."""
        file = self.folder / "signing.pem"
        return file if file.is_file() else None

    def requires(self, use: str) -> bool:
        """Returns whether models must be verified for a use, one of `USES`. Raises InputError on a faulty policy."""
        import yaml

        file = self.folder / "policy.yaml"
        if not file.is_file():
            return False
        try:
            content = yaml.safe_load(file.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError([f"{file} is not YAML: {error}. To fix: write `require_signature: [promote]`"]) from error
        uses = content.get("require_signature") if isinstance(content, dict) and len(content) == 1 else None
        if not isinstance(uses, list) or not set(map(str, uses)) <= {*USES}:
            remedy = f"write `require_signature:` and a list of {', '.join(USES)}"
            raise InputError([f"{file} does not say what must be verified. To fix: {remedy}"])
        return use in uses

    def public(self) -> dict[str, Path]:
        """Returns the public keys that are trusted, by name."""
        return {file.stem: file for file in sorted(self.folder.glob("trusted/*.pem"))}

    def revoked(self) -> dict[str, str]:
        """Returns the names of revoked keys by the hint that signatures made with them carry."""
        return {_hint(file): file.stem for file in self.folder.glob("revoked/*.pem")}


def _hint(public_key: Path) -> str:
    """Returns the digest of the public key that a signature names."""
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_public_key(public_key.read_bytes())
    except ValueError as error:
        raise SignatureError(f"{public_key} is not a public key in PEM: {error}. To fix: remove it") from error
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return sha256(key.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


def _hashing() -> Any:
    from model_signing import hashing

    # Explicit, since by default a file under .git would be covered by no signature.
    return hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def sign(
    files: Mapping[str, Path], *, key: Path, recorded: Mapping[str, Any], materials: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """Signs the files of a model. Returns the contents of the two files to add to them, by name.

    files: all files of the model, by their relative names.
    recorded: the model's record, for the statement. materials: what the model was made from.
    """
    require_extra("signing", feature=f"signing versions with {key}")
    from model_signing import signing

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for relative, file in files.items():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).symlink_to(file.resolve())
        statement = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": each, "digest": {"sha256": sha256_of(files[each])}} for each in sorted(files)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": recorded,
                    "resolvedDependencies": materials,
                },
                "runDetails": {"builder": {"id": "ringmaster"}},
            },
        }
        (folder / STATEMENT).write_text(json.dumps(statement, indent=1, sort_keys=True))
        try:
            signer = signing.Config().use_elliptic_key_signer(private_key=key)
            signer.set_hashing_config(_hashing().set_allow_symlinks(True)).sign(folder, folder / SIGNATURE)
        except (ValueError, TypeError) as error:  # TypeError: a key that requires a password
            remedy = "make it by `openssl ecparam -name prime256v1 -genkey -noout`"
            raise SignatureError(f"{key} signs nothing: {error}. To fix: {remedy}") from error
        return {each: (folder / each).read_bytes() for each in (STATEMENT, SIGNATURE)}


def verify(
    folder: Path, keys: SigningKeys, *, model: str | None = None, signature_digest: str | None = None
) -> SignatureProof:
    """Verifies the files of a model in `folder` by the signature among them. Raises SignatureError where they differ.

    model: what messages call the model; the folder by default, which may be a copy that nobody else knows.
    signature_digest: the SHA-256 of the signature, as the model's record has it.
    """
    model = model or str(folder)
    require_extra("signing", feature="verifying a signature")
    from model_signing import verifying

    file = folder / SIGNATURE
    if not file.is_file() or file.is_symlink():
        raise SignatureError(f"{model} has no signature. To fix: take a version that was recorded with a signing key")
    if signature_digest is not None and sha256_of(file) != signature_digest:
        raise SignatureError(f"{model}: {SIGNATURE} is not the signature that was recorded. To fix: restore the file")
    try:
        bundle = json.loads(file.read_text())
        hint = bundle["verificationMaterial"]["publicKey"]["hint"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SignatureError(f"{model}: {SIGNATURE} is not a signature by a key. To fix: restore the file") from error
    if hint in (revoked := keys.revoked()):
        raise SignatureError(
            f"{model} is signed by the key {revoked[hint]}, which was revoked. "
            "To fix: retrain it, or take another version"
        )
    names = {_hint(public): name for name, public in keys.public().items()}
    if hint not in names:
        raise SignatureError(
            f"{model} is signed by an unknown key ({hint[:16]}...). To fix: put its public key into "
            f"{keys.folder / 'trusted'} if you trust it"
        )
    from cryptography.exceptions import InvalidSignature

    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=keys.public()[names[hint]])
        verifier.set_hashing_config(_hashing()).verify(folder, file)
    except InvalidSignature as error:
        raise SignatureError(
            f"{model}: {SIGNATURE} was not made by the key {names[hint]}. To fix: restore it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:  # of what a damaged bundle lacks
        what = "; ".join(_changed_files(bundle, folder)) or f"{SIGNATURE} is damaged"
        raise SignatureError(f"{model} is not what was signed: {what}. To fix: restore these files") from error
    subject = _signed(bundle)["subject"][0]
    statement = json.loads((folder / STATEMENT).read_text())
    return SignatureProof(
        key=names[hint],
        num_files=len(statement["subject"]) + 1,
        digest=subject["digest"]["sha256"],
        statement=statement,
    )


def _changed_files(bundle: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yields which files of a folder are not those that a signature covers, and how they differ."""
    try:
        signed = {each["name"]: each["digest"] for each in _signed(bundle)["predicate"]["resources"]}
    except (ValueError, KeyError, TypeError):
        return
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted({*signed, *files} - {SIGNATURE}):
        if name not in files:
            yield f"{name} is missing"
        elif name not in signed:
            yield f"{name} was added"
        elif (digest := sha256_of(files[name])) != signed[name]:
            yield f"{name} has the SHA-256 {digest[:12]}..., not {signed[name][:12]}..."


def _signed(bundle: Mapping[str, Any]) -> Mapping[str, Any]:
    from base64 import b64decode

    result: Mapping[str, Any] = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
    return result


def signed_digest(signature: bytes) -> str:
    """Returns the digest by which a signature names its model, without verifying it."""
    return str(_signed(json.loads(signature))["subject"][0]["digest"]["sha256"])
