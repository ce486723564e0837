"""A tensor store that holds each distinct tensor once, and adapted tensors as differences to their parents.

    store = TensorStore(Path("tensors"))
    base = store.add(Path("models/base"))
    child = store.add(Path("models/child"), parent=base.id)
    store.restore(child.id, Path("out"))  # the same bytes that were added

Modules: `folders` (the files of a model), `planes` (byte order and compression), `objects` (files named by their
content's digest), `layout` (the parts of a safetensors file), `lists` (the list of a model's files and tensors),
`store` (adding and restoring models, `gc` and `fsck`).
"""

from ringmaster.errors import TensorStoreError
from ringmaster.model_lineage.tensors.lists import StoredModel
from ringmaster.model_lineage.tensors.store import TensorStore

__all__ = ["StoredModel", "TensorStore", "TensorStoreError"]
