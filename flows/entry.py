"""The entry point of `ringmaster`, which answers Ctrl-C before it imports anything slow."""

import os
import sys
from pathlib import Path

from ringmaster.flows import interrupts

INPUT_FAULT = 2


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


def main() -> None:
    """Runs the command line. Faults in the user's input are shown without a traceback, with exit status 2."""
    open_missing_streams()
    check_process()
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
            sys.exit(1)
        except OSError as error:
            if (fault := storage_fault(error)) is None:
                raise
            report_faults([fault])
            sys.exit(1)
        finally:
            server_answers.timeout_s.reset(waiting)


if __name__ == "__main__":
    main()
