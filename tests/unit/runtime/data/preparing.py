"""What a process of its own does in a test; free of torch, so that it starts quickly."""

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data import prepare


def prepare_here(folder, barrier, results):
    """Waits for the others, prepares the text in `folder`, and says where."""
    barrier.wait()
    spec = DataSpec(path=str(folder / "*.txt"), seq_len=16, vocab_size=300, held_out=0.2)
    results.put(prepare(spec, cache_dir=folder / "cache").folder)
