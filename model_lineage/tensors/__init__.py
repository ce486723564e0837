"""The tensor store: the weights of many models, each tensor kept once, and what was adapted as a difference.

    store = TensorStore(Path("tensors"))
    base = store.add(Path("models/base"))
    child = store.add(Path("models/child"), parent=base.id)
    store.restore(child.id, Path("out"))  # the very bytes that were added

Its parts: `folders` (which files a model has), `planes` (how bytes are arranged and compressed), `objects` (files named
by what they hold), `layout` (what a safetensors file consists of), `lists` (what a model consists of), `store` (models,
restoring, `gc` and `fsck`).
"""

from ringmaster.model_lineage.tensors.lists import StoredModel
from ringmaster.model_lineage.tensors.store import StoreFault, TensorStore

__all__ = ["StoreFault", "StoredModel", "TensorStore"]
