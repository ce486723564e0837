"""A tensor store that holds each distinct tensor once, and adapted tensors as differences to their parents.

    store = TensorStore(Path("tensors"))
    base = store.add(Path("models/base"))
    child = store.add(Path("models/child"), parent=base.id)
    store.restore(child.id, Path("out"))  # the same bytes that were added

Modules: `model_files` (the files of a model and their parts), `objects` (compressed files named by their content's
digest), `references` (small files that stand for weights), `store` (adding and restoring models, `gc` and `fsck`),
`artifacts` and `mlflow_plugin` (the store as MLflow's repository of artifacts), `comparison` (of two models' tensors).
"""

from ringmaster.errors import TensorStoreError
from ringmaster.model_lineage.tensors.model_files import StoredModel
from ringmaster.model_lineage.tensors.store import TensorStore

__all__ = ["StoredModel", "TensorStore", "TensorStoreError"]
