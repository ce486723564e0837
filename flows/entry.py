"""The entry point of `ringmaster`, which answers Ctrl-C before it imports anything slow."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from ringmaster.compat.python import run_exit_functions
from ringmaster.flows import interrupts
from ringmaster.flows.exit_codes import FAILED, INPUT_FAULT, SIGNALLED, UNWRITTEN


def open_missing_streams() -> None:
    """Opens what is closed of stdin, stdout and stderr: a database that got its number would get what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def check_process() -> None:
    """Ends the process, with one line, where libraries cannot work in it: without a working folder, or docstrings."""
    fault = ""
    try:
        Path.cwd()
    except OSError as error:
        fault = f"the working folder cannot be used: {error.strerror}. To fix: change to a folder that exists"
    if sys.flags.optimize > 1:
        fault = "Python runs without docstrings, which libraries read. To fix: unset PYTHONOPTIMIZE, and leave out -OO"
    if fault:
        sys.stderr.write(f"{fault}\n")
        sys.exit(INPUT_FAULT)


def process() -> NoReturn:
    """Runs the command line as all that this process does, by what an earlier command has left if there is that.

    It ends without the interpreter's deletion of every module, which takes more than a second after a run.
    """
    status = status_of(partial(main, may_forward=True))
    run_exit_functions()
    exit_process(status)


def status_of(call: Callable[[], object]) -> int:
    """Returns the exit status of an interpreter that calls `call`."""
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except BaseException:  # noqa: BLE001 - the outermost frame of the process, as in an interpreter
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def exit_process(status: int) -> NoReturn:
    """Ends this process at once, with the status of an interpreter that cannot write its last output."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        status = status or UNWRITTEN
    os._exit(status)


def main(*, may_forward: bool = False) -> None:
    """Runs the command line. Faults in the user's input are shown without a traceback, with exit status 2.

    may_forward: whether a process that an earlier command has left may run the command in place of this one.
    """
    open_missing_streams()
    check_process()
    if may_forward and sys.argv[1:2] and sys.argv[1] in interrupts.FORWARDED_COMMANDS:
        from ringmaster.flows.resident_processes import resident_processes

        if (status := resident_processes().forward(sys.argv[1:])) is not None:
            sys.exit(status)
    with interrupts.ending_in_time(), interrupts.command(sys.argv[1:]) as signals:
        from ringmaster.errors import BatchCancelled, InputError, RingmasterError
        from ringmaster.files import storage_fault
        from ringmaster.flows import settings
        from ringmaster.flows.cli import app
        from ringmaster.flows.file_permissions import keep_to_owner
        from ringmaster.flows.output import prepare_streams, report_faults
        from ringmaster.flows.proxies import report_bypass
        from ringmaster.flows.services import server_answers

        prepare_streams()
        waiting = server_answers.timeout_s.set(server_answers.TIMEOUT_S)
        report_bypass()
        try:
            keep_to_owner(settings.home())
            app(obj=signals)
        except InputError as error:
            report_faults(error.faults)
            sys.exit(INPUT_FAULT)
        except (BatchCancelled, RingmasterError) as error:
            report_faults([str(error)])
            sys.exit(FAILED)
        except OSError as error:
            if (fault := storage_fault(error)) is None:
                raise
            report_faults([fault])
            sys.exit(FAILED)
        finally:
            server_answers.timeout_s.reset(waiting)


if __name__ == "__main__":
    process()
