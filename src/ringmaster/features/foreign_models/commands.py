"""Commands for models of other programs: `convert` and `lineage import`, and options of `export` that write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.codec import to_json
from ringmaster.errors import InputError, RingmasterError, input_errors, raise_faults
from ringmaster.extras import require_extra
from ringmaster.features.foreign_models import GgufType
from ringmaster.files import check_new
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.lineage.home import lineage_home
from ringmaster.flows.output import AsJson, notice, print_outcome
from ringmaster.text import is_printable_name

if TYPE_CHECKING:
    from ringmaster.features.foreign_models.importing import Converter

GGUF = "gguf"


class Layout(StrEnum):
    """The layouts of exported folders."""

    hf = "hf"
    vllm = "vllm"
    ollama = "ollama"


def convert(
    source: Annotated[
        str, typer.Argument(help="Checkpoint (or folder or URL of them), of a job or another trainer, or model of HF.")
    ],
    destination: Annotated[Path, typer.Argument(help="Folder to write, or GGUF file; it must not exist yet.")],
    to: Annotated[
        str,
        typer.Option(
            help="hf, which from_pretrained loads; checkpoint, for warm_start; dcp, torchtitan's; megatron, "
            "Megatron-Core's torch_dist; or gguf, a file for llama.cpp and Ollama."
        ),
    ],
    type: Annotated[
        GgufType | None,
        typer.Option(help="Of gguf: type of the matrices. Default: bf16 for a model in bf16, else f16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a model and its optimizer between trainers, bit by bit, tensor by tensor."""
    if to == GGUF:
        _write_gguf(source=source, destination=destination, type=type, as_json=as_json)
        return
    if type is not None:
        raise InputError([f"--type is of gguf, and --to is {to}. To fix: leave out --type"])
    from ringmaster.features.foreign_models.conversion import convert as convert_model

    with input_errors():
        done = convert_model(source, destination, to=to)
    sentence = (
        f"{done['num_tensors']} tensors ({done['num_bytes'] / 1e6:.1f} MB) of a {done['from']} model are now in "
        f"{done['destination']}, with {done['num_states'] or 'no'} states of an optimizer and "
        f"{', '.join(done['tokenizer_files']) or 'no tokenizer'}."
    )
    print_outcome(done, [sentence], as_json=as_json)


def _write_gguf(*, source: str, destination: Path, type: GgufType | None, as_json: bool) -> None:
    with input_errors():
        require_extra(GGUF, feature=f"the GGUF file {destination}")
        from ringmaster.features.foreign_models.gguf_file import write_model

        done = write_model(source, destination, type=type)
    text = f"{done.num_tensors} tensors of a {done.architecture} model are now in {done.file}, as {done.type}"
    lines = [f"{text}: {done.num_bytes / 1e6:.1f} MB"]
    if done.num_unquantized:
        lines.append(f"{done.num_unquantized} matrices are f16: their rows are no whole blocks of 32 values")
    print_outcome(to_json(done), lines, as_json=as_json)


def import_(
    source: Annotated[str, typer.Argument(help="Folder of a model or checkpoint, GGUF file, or name on the hub.")],
    name: Annotated[str, typer.Option(help="Name of the registered model.")],
    as_json: AsJson = False,
) -> None:
    """Record a model from elsewhere; what its card names as base_model becomes its parent."""
    from ringmaster.features.foreign_models.importing import import_model
    from ringmaster.model_lineage.base_models import fetch_from_hub

    if not is_printable_name(name) or set(name) & set("/:@'\""):
        raise InputError([f"a model cannot be called {name!r}. To fix: use letters, digits, '-', '_' and '.'"])
    with lineage_home(writes=True) as home:
        try:
            record = import_model(
                home.ledger,
                source,
                name=name,
                snapshot=home.snapshot,
                store=home.store,
                fetch=fetch_from_hub,
                converter_of=_converter_of,
            )
        except (OSError, ValueError) as error:
            if isinstance(error, RingmasterError):
                raise
            raise InputError([str(error)]) from error
        outcome = f", from {len(record.parents)} recorded base model(s)" if record.parents else ""
        result = {"id": record.model_id, "uri": record.uri, "parents": list(record.parents)}
        print_outcome(result, [f"{record.registered_name}/{record.version} is recorded{outcome}"], as_json=as_json)


def _converter_of(place: Path) -> Converter | None:
    """Returns what makes a folder of safetensors of a file or a checkpoint; None for a model's folder."""
    is_gguf = place.suffix == f".{GGUF}"
    if not is_gguf and (place.is_file() or any(place.glob("*.safetensors"))):
        return None
    from ringmaster.features.foreign_models.conversion import converted_checkpoint, converted_gguf
    from ringmaster.features.foreign_models.foreign_checkpoints import find_checkpoint

    if is_gguf:
        return converted_gguf
    return None if find_checkpoint(place) is None else converted_checkpoint


def with_layouts(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the layouts of inference engines, and the publication on a hub, to `ringmaster export`."""

    def exported(
        *, folder: Path | None, layout: Layout, base: str | None, push: str | None, public: bool, **options: Any
    ) -> None:
        merge = options["merge"]
        raise_faults([*_option_faults(folder, layout=layout, base=base, push=push, is_public=public, merge=merge)])
        if push is not None:
            _publish(folder=folder, repo=push, is_public=public, **options)
        elif folder is not None and layout is not Layout.hf:
            _write_layout(folder=folder, layout=layout, base=base, **options)
        else:
            command(folder=folder, **options)

    place = typer.Argument(help="Folder to write; it must not exist yet. Optional with --push.", show_default=False)
    layouts = typer.Option("--format", help="hf, as `from_pretrained` reads it; vllm, an adapter; or ollama, in GGUF.")
    name = typer.Option(help="With --format ollama: the adapter's base by its name there. Default: it is written too.")
    repo = typer.Option(metavar="OWNER/NAME", help="Publish it on the Hugging Face hub, with a card of its lineage.")
    visible = typer.Option("--public", help="With --push: let everybody see it. A new repository is private otherwise.")
    return with_parameters(
        command,
        exported,
        folder=(Annotated[Path | None, place], None),
        layout=(Annotated[Layout, layouts], Layout.hf),
        base=(Annotated[str | None, name], None),
        push=(Annotated[str | None, repo], None),
        public=(Annotated[bool, visible], False),
    )


def _option_faults(
    folder: Path | None, *, layout: Layout, base: str | None, push: str | None, is_public: bool, merge: bool
) -> Iterator[str]:
    if folder is None and push is None:
        yield "there is no folder to write. To fix: name a folder, or a repository by --push OWNER/NAME"
    if is_public and push is None:
        yield "--public is of --push. To fix: name a repository by --push OWNER/NAME"
    if push is not None and layout is not Layout.hf:
        yield f"--push publishes the format hf. To fix: leave out --format {layout}, or --push"
    if merge and layout is Layout.vllm:
        yield "--merge makes a whole model, which vllm reads as it is. To fix: leave out --format vllm, or --merge"
    if base is not None and layout is not Layout.ollama:
        yield "--base is of --format ollama. To fix: leave out --base"


def _write_layout(*, model: str, folder: Path, layout: Layout, base: str | None, merge: bool, as_json: bool) -> None:
    from ringmaster.flows.commands.models import write_folder
    from ringmaster.flows.retraining.examine import find

    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lineage_home() as home, input_errors(), TemporaryDirectory(dir=folder.parent, prefix=".merged-") as aside:
        examined = find(model, home)
        if layout is Layout.vllm:
            from ringmaster.features.foreign_models.engine_checks import VLLM, checked_adapter, vllm_rank

            rank = vllm_rank(checked_adapter(examined.folder, engine=VLLM)["r"])
            write_folder(examined, folder, merge=False)
            name = re.sub(r"[^\w.-]+", "-", Path(examined.label).name if Path(model).is_dir() else examined.label)
            command = f"vllm serve BASE --enable-lora --max-lora-rank {rank} --lora-modules {name}={folder}"
        else:
            require_extra(GGUF, feature=f"--format {layout}")
            from ringmaster.features.foreign_models.engine_folders import write_ollama

            merged = Path(aside, "merged")
            if merge:
                write_folder(examined, merged, merge=True)
            write_ollama(merged if merge else examined.folder, folder, base=base)
            command = f"ollama create NAME -f {folder / 'Modelfile'}"
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    result = {"model": examined.label, "folder": str(folder), "num_bytes": num_bytes, "is_merged": merge}
    lines = [f"{examined.label} is in {folder}, for {layout}: {num_bytes / 1e6:.1f} MB", f"now: {command}"]
    print_outcome({**result, "format": layout, "command": command}, lines, as_json=as_json)


def _publish(*, model: str, folder: Path | None, merge: bool, repo: str, is_public: bool, as_json: bool) -> None:
    from ringmaster.features.foreign_models.hub import HubTarget
    from ringmaster.features.foreign_models.hub_folder import complete_folder
    from ringmaster.flows.commands.models import write_folder
    from ringmaster.flows.retraining.examine import find

    if folder is not None:
        check_new(folder)
    target = HubTarget.of(repo, is_public=is_public)
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    with lineage_home() as home, input_errors():
        examined = find(model, home)
        with TemporaryDirectory(dir=None if folder is None else folder.absolute().parent) as aside:
            place = Path(aside, "model")
            write_folder(examined, place, merge=merge)
            notices = complete_folder(place, examined, home)
            done = target.publish(place, message=f"{examined.label}, by Ringmaster")
            if folder is not None:
                place.rename(folder)
    visible = "private" if done.is_private else "public"
    lines = [
        f"{examined.label} is in the {visible} repository {done.url}: {done.num_files} files, commit {done.commit}"
    ]
    lines += [f"removed there: {name}, of an earlier version" for name in done.removed]
    for text in notices:
        notice(text)
    print_outcome({"model": examined.label, "is_merged": merge, **to_json(done)}, lines, as_json=as_json)


COMMANDS = {"Models": (convert,), "lineage": (import_,)}
OPTIONS = {"export": with_layouts}
