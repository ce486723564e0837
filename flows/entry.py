"""The entry point of `ringmaster`, which answers Ctrl-C before it imports anything slow."""

import sys

from ringmaster.flows.process import interrupts


def main() -> None:
    """Runs the command line."""
    with interrupts.command(sys.argv[1:]):
        from ringmaster.flows.cli import main as run_command

        run_command()
