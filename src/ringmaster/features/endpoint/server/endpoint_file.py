"""Files of training endpoints: which bases are served, to how many clients, in which bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from ringmaster.findings import Finding
from ringmaster.tasks.batch.references import Distinct, Name, Positive, Whole, pretrained
from ringmaster.tasks.batch.sections import Section
from ringmaster.tasks.batch.yaml_sections import file_error, findings, read_document

WHAT = "a file of an endpoint"
MAX_ADAPTERS, MAX_RANK, MAX_SEQ_LEN, MAX_DEVICES = 1024, 1024, 1_000_000, 64
OWN_KEYS = {"jobs": "run", "grid": "run", "template": "sweep", "space": "sweep", "night": "retrain"}
"""Keys of files of other kinds, and the command that takes those."""

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]


class BaseEntry(Section):
    """A base that is served."""

    name: BaseName = Field(description="the name by which clients ask for it, such as tiny-llama")
    from_pretrained: Annotated[str, AfterValidator(pretrained)] = Field(
        description="a folder with the model, or its name on the hub, such as data/base"
    )
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="fp32, or bf16 for half the memory; adapters are stored in fp32 with both"
    )


class ServeEntry(Section):
    """What is served."""

    bases: Annotated[list[BaseEntry], Field(min_length=1)] = Field(
        description="the bases, such as [{name: tiny-llama, from_pretrained: data/base}]"
    )
    max_adapters: Annotated[Whole, Field(le=MAX_ADAPTERS)] = Field(
        default=16, description="the most clients of a base at a time, such as 16"
    )
    max_rank: Annotated[Whole, Field(le=MAX_RANK)] = Field(
        default=32, description="the largest rank of an adapter, such as 32"
    )
    seq_len: Annotated[Whole, Field(le=MAX_SEQ_LEN)] = Field(
        default=512, description="the most tokens of a row, or of a prompt with its sample, such as 512"
    )
    idle_s: Positive = Field(
        default=600.0, description="seconds without a request after which the endpoint ends, such as 600"
    )
    client_timeout_s: Positive = Field(
        default=300.0, description="seconds without a sign of life after which a client has ended, such as 300"
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] | None = Field(
        default=None, description="cpu, or a GPU such as cuda:0; by default a GPU where there is one"
    )
    devices: Annotated[Whole, Field(le=MAX_DEVICES)] = Field(
        default=1, description="on how many devices there is a replica of each base, for its share of the clients"
    )
    port: Annotated[Whole, Field(le=65_535)] | None = Field(
        default=None, description="the port on 127.0.0.1, such as 8765; by default any, which is kept"
    )
    owners: Annotated[list[Name], Distinct, Field(min_length=1)] = Field(
        default=["owner"], description="whose clients are kept apart, each by a key of their own, such as [ann, bob]"
    )


class EndpointFile(Section):
    """A whole file of an endpoint."""

    name: Name = Field(description="a name, such as endpoint")
    serve: ServeEntry = Field(description="what is served, such as {bases: [...]}")


def load_endpoint_file(path: Path) -> EndpointFile:
    """Reads the file of an endpoint. Raises BatchFileError with all faults, each with its line."""
    read = read_document(path, what=WHAT)
    if read.data is None:
        raise file_error(read.findings, read, file=path.name)
    faults = list(read.findings)
    others = [key for key in OWN_KEYS if key in read.data]
    if others and "serve" not in read.data:
        command = OWN_KEYS[others[0]]
        raise file_error(
            [Finding((), f"has `{others[0]}:`, so it is not {WHAT}", f"run it by `ringmaster {command}`")],
            read,
            file=path.name,
        )
    try:
        entry = EndpointFile.model_validate(read.data, context={"folder": path.parent.resolve()})
    except ValidationError as error:
        raise file_error([*faults, *findings(error, root=EndpointFile)], read, file=path.name) from error
    if faults := [*faults, *_findings(entry)]:
        raise file_error(faults, read, file=path.name)
    return entry


def _findings(entry: EndpointFile) -> Iterator[Finding]:
    names: set[str] = set()
    for i, base in enumerate(entry.serve.bases):
        if base.name in names:
            yield Finding(("serve", "bases", i, "name"), f"{base.name!r} is the name of two bases", "rename one")
        names.add(base.name)
    if entry.serve.devices > 1 and ":" in (entry.serve.device or ""):
        text = f"is one GPU, and devices asks for {entry.serve.devices}"
        yield Finding(("serve", "device"), text, "cuda, or leave it out")


def endpoint_schema() -> dict[str, Any]:
    """Returns the schema of these files."""
    return EndpointFile.model_json_schema()
