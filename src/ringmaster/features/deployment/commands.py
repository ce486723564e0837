"""What `ringmaster convert` and `ringmaster export` write for other programs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ringmaster.codec import to_json
from ringmaster.errors import InputError, input_errors, raise_faults
from ringmaster.extras import require_extra
from ringmaster.features.deployment import GgufType
from ringmaster.files import check_new
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.lineage.home import lineage_home
from ringmaster.flows.output import notice, print_outcome

GGUF = "gguf"


class Layout(StrEnum):
    """The layouts of exported folders."""

    hf = "hf"
    vllm = "vllm"
    ollama = "ollama"


def with_gguf(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the format GGUF to `ringmaster convert`."""

    def converted(*, to: str, type: GgufType | None, **options: Any) -> None:
        if to == GGUF:
            _write_gguf(type=type, **options)
            return
        if type is not None:
            raise InputError([f"--type is of gguf, and --to is {to}. To fix: leave out --type"])
        command(to=to, **options)

    (of_command,) = inspect.signature(command, eval_str=True).parameters["to"].annotation.__metadata__
    formats = typer.Option(help=f"{of_command.help.removesuffix('.')}; or gguf, a file for llama.cpp and Ollama.")
    types = typer.Option(help="Of gguf: type of the matrices. Default: bf16 for a model in bf16, else f16.")
    place = typer.Argument(help="Folder to write, or GGUF file; it must not exist yet.")
    empty = inspect.Parameter.empty
    return with_parameters(
        command,
        converted,
        destination=(Annotated[Path, place], empty),
        to=(Annotated[str, formats], empty),
        type=(Annotated[GgufType | None, types], None),
    )


def _write_gguf(*, source: str, destination: Path, type: GgufType | None, as_json: bool) -> None:
    with input_errors():
        require_extra(GGUF, feature=f"the GGUF file {destination}")
        from ringmaster.features.deployment.gguf_file import write_model

        done = write_model(source, destination, type=type)
    text = f"{done.num_tensors} tensors of a {done.architecture} model are now in {done.file}, as {done.type}"
    lines = [f"{text}: {done.num_bytes / 1e6:.1f} MB"]
    if done.num_unquantized:
        lines.append(f"{done.num_unquantized} matrices are f16: their rows are no whole blocks of 32 values")
    print_outcome(to_json(done), lines, as_json=as_json)


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
            from ringmaster.features.deployment.engine_checks import VLLM, checked_adapter, vllm_rank

            rank = vllm_rank(checked_adapter(examined.folder, engine=VLLM)["r"])
            write_folder(examined, folder, merge=False)
            name = re.sub(r"[^\w.-]+", "-", Path(examined.label).name if Path(model).is_dir() else examined.label)
            command = f"vllm serve BASE --enable-lora --max-lora-rank {rank} --lora-modules {name}={folder}"
        else:
            require_extra(GGUF, feature=f"--format {layout}")
            from ringmaster.features.deployment.engine_folders import write_ollama

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
    from ringmaster.features.deployment.hub import HubTarget
    from ringmaster.features.deployment.hub_folder import complete_folder
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


OPTIONS = {"convert": with_gguf, "export": with_layouts}
