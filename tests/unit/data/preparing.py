"""An action for a child process of a test. It imports no torch, so that the child starts quickly."""

from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import DataSpec


def prepare_here(folder, barrier, results):
    """Waits for the others, prepares the text in `folder`, and puts its folder in `results`."""
    barrier.wait()
    spec = DataSpec(path=str(folder / "*.txt"), seq_len=16, vocab_size=300, held_out=0.2)
    results.put(prepare(spec, cache_dir=folder / "cache").folder)
