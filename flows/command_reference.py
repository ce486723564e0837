"""Generator of the reference page of all commands: `python -m ringmaster.flows.command_reference`."""

from collections.abc import Iterator

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ringmaster.flows.cli import app
from ringmaster.flows.exit_codes import EXIT_CODES
from ringmaster.flows.output import write_document
from ringmaster.text import markdown_table

Command = TyperCommand | TyperGroup

INTRODUCTION = """# Commands

`ringmaster COMMAND --help` lists the options of a command. Results go to stdout, all else goes to stderr. With `--json`
stdout is one JSON object; the commands without that option run until they are stopped, or print a document.

    ringmaster --install-completion      # the shell completes commands, options, and names of batches and jobs
"""
RESULT = """## Result of a batch

`ringmaster run BATCH.yaml --json` prints one object, whose values [`BatchResult`](running.md) describes:

```
{"batch": "first", "status": "done", "makespan_s": 41.2, "num_trials": 0, "faults": [],
 "plan": {"makespan_s": 39.8, "lower_bound_s": 39.1, "gap": 0.018, ...},
 "jobs": [{"name": "small", "status": "done", "num_steps": 60, "metrics": {"loss": 3.1}, "message": "",
           "segments": [{"technique": "ddp", "num_devices": 2, "first_step": 0, "last_step": 60, ...}],
           "model_dir": ".../batches/first/.../small/model", "model_uri": "models:/..."}, ...]}
```

`status` is `done`, `failed`, `cancelled` or `interrupted`; all but the first can be continued with `--resume`.
`model_dir` is a folder that `from_pretrained` loads. `ringmaster status --json` lists the jobs of all batches,
`ringmaster watch --once --json` the plan and the segments of one.
"""


def reference() -> str:
    """Returns the page as Markdown: exit codes, the result of a batch, and a table of commands for each panel."""
    codes = markdown_table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()])
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, name, command in commands(typer.main.get_group(app)):
        usage, summary = " ".join([f"ringmaster {name}", *_usage(command)]), " ".join((command.help or "").split())
        panels.setdefault(panel, []).append((_cell(f"`{usage}`"), _cell(summary)))
    tables = [f"## {panel}\n\n{markdown_table(('command', 'does'), rows)}\n" for panel, rows in panels.items()]
    return "\n".join([INTRODUCTION, f"## Exit codes\n\n{codes}\n", RESULT, *tables])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands(command: Command, *, name: str = "", panel: str = "") -> Iterator[tuple[str, str, Command]]:
    """Yields the panel, the full name and the command for each command of a group and the groups in it."""
    if not isinstance(command, TyperGroup):
        yield panel, name, command
        return
    for each, inner in command.commands.items():
        assert isinstance(inner, Command)
        own = getattr(inner, "rich_help_panel", None)
        yield from commands(inner, name=f"{name} {each}".strip(), panel=panel or (own if isinstance(own, str) else ""))


def _usage(command: Command) -> Iterator[str]:
    """Yields the arguments of a command, and the options that it needs."""
    for each in command.params:
        name = each.metavar or (each.name or "").upper()
        if isinstance(each, TyperArgument):
            name += "..." if each.nargs == -1 and not each.metavar else ""
            yield name if each.required or name.startswith("[") else f"[{name}]"
        elif each.required:
            yield f"{each.opts[0]} {name}"


if __name__ == "__main__":
    write_document(reference())
