"""The exit codes of the commands, as the page of commands describes them. Importing this imports nothing slow."""

import signal
from collections.abc import Mapping

DONE = 0
FAILED = 1
INPUT_FAULT = 2
UNWRITTEN = 120
"""Python's own exit code where its last output cannot be written."""
SIGNALLED = 128
"""Added to the number of the signal that ended a command."""

EXIT_CODES: Mapping[int, str] = {
    DONE: "everything that was requested is done and recorded",
    FAILED: "anything else: a job failed, a record is missing, a check or a promotion was refused, a server is away",
    INPUT_FAULT: "a fault in the input: the command line, a file, a name, a setting; stderr names all faults at once",
    UNWRITTEN: "the end of the output could not be written to stdout",
    SIGNALLED + signal.SIGHUP: "the terminal was closed; jobs have written a checkpoint",
    SIGNALLED + signal.SIGINT: "Ctrl-C; jobs have written a checkpoint, after a second one the command was killed",
    SIGNALLED + signal.SIGKILL: "the process that trains was killed",
    SIGNALLED + signal.SIGTERM: "SIGTERM; jobs have written a checkpoint, after a second one the command was killed",
}
"""What each exit code means."""
