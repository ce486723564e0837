"""Whether a batch can be planned where it is started: among these nodes, and beside the terms of a pool."""

from collections.abc import Mapping, Sequence

from ringmaster.tasks.batch import document
from ringmaster.tasks.batch.batch import Batch
from ringmaster.tasks.batch.yaml_sections import file_error
from ringmaster.tasks.planning.term_features import TermsFeature, feature_findings
from ringmaster.text import Notice


def check_placement(
    batch: Batch,
    *,
    nodes: Mapping[str, str],
    of_pool: Sequence[TermsFeature] = (),
    notice: Notice | None = None,
) -> None:
    """Raises BatchFileError with everything that keeps a batch from being planned by its terms.

    nodes: the kinds of devices of the nodes that are there, by name.
    of_pool: the features of the terms of all plans of the pool, if there is one.
    notice: shows names of nodes that are not there, and may join later, and what the pool overrides; None where such
        names are faults.
    """
    features = batch.terms.features
    faults = list(feature_findings(features, objective=batch.objective, of_pool=of_pool))
    absent = [finding for feature in features for finding in feature.node_findings(nodes)]
    if notice is None:
        faults += absent
    if faults:
        is_generated = batch.text.startswith("{")  # of a batch in Python, or a file without lines for a person
        lines = document.YamlDocument() if is_generated else document.read(batch.text)
        raise file_error(faults, lines, file="" if is_generated else batch.name)
    if notice is not None:
        for feature in of_pool:
            for line in feature.overrides(price_per_device_hour=batch.price_per_device_hour):
                notice(line)
        for finding in absent:
            place = document.place_text(finding.place)
            notice(f"{place} {finding.message}; a node that joins later may have this name")
