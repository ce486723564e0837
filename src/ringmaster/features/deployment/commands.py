"""What `ringmaster convert` and `ringmaster export` write for other programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ringmaster.codec import to_json
from ringmaster.errors import InputError, input_errors, raise_faults
from ringmaster.extras import require_extra
from ringmaster.features.deployment import GgufType
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.lineage.home import lineage_home
from ringmaster.flows.output import notice, print_outcome

GGUF = "gguf"


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


def with_push(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the publication on a hub to `ringmaster export`."""

    def exported(*, folder: Path | None, push: str | None, public: bool, **options: Any) -> None:
        raise_faults([*_option_faults(folder, push=push, is_public=public)])
        if push is not None:
            _publish(folder=folder, repo=push, is_public=public, **options)
        else:
            command(folder=folder, **options)

    place = typer.Argument(help="Folder to write; it must not exist yet. Optional with --push.", show_default=False)
    repo = typer.Option(metavar="OWNER/NAME", help="Publish it on the Hugging Face hub, with a card of its lineage.")
    visible = typer.Option("--public", help="With --push: let everybody see it. A new repository is private otherwise.")
    return with_parameters(
        command,
        exported,
        folder=(Annotated[Path | None, place], None),
        push=(Annotated[str | None, repo], None),
        public=(Annotated[bool, visible], False),
    )


def _option_faults(folder: Path | None, *, push: str | None, is_public: bool) -> Iterator[str]:
    if folder is None and push is None:
        yield "there is no folder to write. To fix: name a folder, or a repository by --push OWNER/NAME"
    if is_public and push is None:
        yield "--public is of --push. To fix: name a repository by --push OWNER/NAME"


def _publish(*, model: str, folder: Path | None, merge: bool, repo: str, is_public: bool, as_json: bool) -> None:
    from ringmaster.features.deployment.hub import HubTarget
    from ringmaster.features.deployment.hub_folder import complete_folder
    from ringmaster.flows.commands.models import write_folder
    from ringmaster.flows.retraining.examine import find

    target = HubTarget.of(repo, is_public=is_public)
    with lineage_home() as home, input_errors():
        found = find(model, home)
        with TemporaryDirectory(dir=None if folder is None else folder.absolute().parent) as aside:
            place = Path(aside, "model")
            write_folder(found, place, merge=merge)
            notices = complete_folder(place, found, home)
            done = target.publish(place, message=f"{found.label}, by Ringmaster")
            if folder is not None:
                place.rename(folder)
    visible = "private" if done.is_private else "public"
    lines = [f"{found.label} is in the {visible} repository {done.url}: {done.num_files} files, commit {done.commit}"]
    lines += [f"removed there: {name}, of an earlier version" for name in done.removed]
    for text in notices:
        notice(text)
    print_outcome({"model": found.label, "is_merged": merge, **to_json(done)}, lines, as_json=as_json)


OPTIONS = {"convert": with_gguf, "export": with_push}
