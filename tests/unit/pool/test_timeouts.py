import pytest

from ringmaster.tasks.pool.nodes import VARIABLE, Timeouts


def test_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Timeouts.of_environment() == Timeouts(beat_every_s=5, lost_after_s=60, fence_after_s=40)
    monkeypatch.setenv(VARIABLE, "1, 12, 8")
    assert Timeouts.of_environment() == Timeouts(beat_every_s=1, lost_after_s=12, fence_after_s=8)


@pytest.mark.parametrize("text", ["1,2", "soon,12,8", "1,8,12", "8,12,1", "0,12,8", ""])
def test_what_cannot_be_is_refused_with_a_remedy(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match="To fix"):
        Timeouts.of_environment()
