"""Values that travel between processes have a portable form."""

from ringmaster.techniques.interface.values import from_json, to_json
from ringmaster.techniques.runtime.processes.gang import CRASHED, Outcome


def test_an_outcome_can_be_kept_whatever_a_users_exception_says():
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    outcome = Outcome(status=CRASHED, message=f"{name} is no image\0")
    assert outcome.message == "caf?.png is no image"
    assert outcome.message.encode()
    assert from_json(Outcome, to_json(outcome)) == outcome
