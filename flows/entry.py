"""Where `ringmaster` starts: it answers Ctrl-C before it imports anything that takes time."""

import sys

from ringmaster.flows import interrupts


def main() -> None:
    """The entry point of the command line."""
    with interrupts.command(sys.argv[1:]):
        from ringmaster.flows.cli import main as run_command

        run_command()
