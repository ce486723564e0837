"""Values that travel between processes have a portable form."""

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.techniques.processes.gang_events import Outcome, OutcomeStatus


def test_an_outcome_can_be_kept_whatever_a_users_exception_says():
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    outcome = Outcome(status=OutcomeStatus.CRASHED, message=f"{name} is not an image\0")
    assert outcome.message == r"caf\udce9.png is not an image\x00"
    assert outcome.message.encode()
    assert from_json(Outcome, to_json(outcome)) == outcome


def test_a_status_is_a_plain_string_in_json_and_a_status_again_after_it():
    content = to_json(Outcome(status=OutcomeStatus.OUT_OF_MEMORY))
    assert (type(content["status"]), content["status"]) == (str, "out_of_memory")
    assert from_json(Outcome, content).status is OutcomeStatus.OUT_OF_MEMORY
    with pytest.raises(ValueError, match="'tired' is not a valid OutcomeStatus"):
        from_json(Outcome, {**content, "status": "tired"})
