"""The entry point by which MLflow finds the artifact repository of the scheme `tensors:`.

MLflow loads entry points while it is imported itself, when the repository's base class is not there yet. This module
therefore imports nothing of MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmaster.model_lineage.tensors.artifacts import TensorArtifactRepository


def repository(
    artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
) -> TensorArtifactRepository:
    """Returns the artifacts at a URI of the scheme `tensors:`."""
    from ringmaster.model_lineage.tensors.artifacts import TensorArtifactRepository

    return TensorArtifactRepository(artifact_uri, tracking_uri, registry_uri)
