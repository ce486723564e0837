"""The tariff of a pool: read from a file, and stored with the pool, for the plans of all its batches."""

from pathlib import Path

from pydantic import ValidationError

from ringmaster.codec import from_json
from ringmaster.features.tariffs.batch import TariffsInFiles
from ringmaster.features.tariffs.job import TimedTariff
from ringmaster.features.tariffs.terms import Tariffs
from ringmaster.findings import Finding
from ringmaster.tasks.batch.rules import not_finite
from ringmaster.tasks.batch.sections import section_of
from ringmaster.tasks.batch.yaml_sections import file_error, findings, read_document
from ringmaster.tasks.pool.active_batches import change_feature, features_of_pool
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal


def load_tariff(path: Path) -> Tariffs:
    """Returns the tariffs of a YAML file with the keys of `TimedTariff`, with the values of the files that it names.

    Raises BatchFileError with all faults and their lines.
    """
    read, folder, keys = read_document(path, what="a tariff, such as tariff.yaml"), path.parent, TariffsInFiles()
    if read.data is None:
        raise file_error(read.findings, read, file=path.name)
    section, faults = section_of(TimedTariff), list(read.findings)
    try:
        entry = section.model_validate(read.data)
    except ValidationError as error:
        faults += findings(error, root=section)
    known = {key: value for key, value in read.data.items() if key in section.model_fields}
    faults += [*keys.file_findings(known, folder=folder), *not_finite(known, place=())]
    planned = {} if faults else keys.planning_features(entry, folder=folder)
    tariffs = from_json(Tariffs, planned[Tariffs.key]) if planned else Tariffs()
    if tariffs.is_empty and not faults:
        faults = [Finding((), "it says nothing", "give price, energy_price, carbon, power_w or tariffs")]
    if faults:  # one for each place: the first, as in a batch file
        raise file_error({each.place: each for each in reversed(faults)}.values(), read, file=path.name)
    return tariffs


def tariffs_of_pool(database: Database) -> Tariffs | None:
    """Returns the tariffs of a pool; None where it had none, and for the database of a batch on one machine alone.

    They are empty, beside the former ones, where they were removed.
    """
    return next((each for each in features_of_pool(database) if isinstance(each, Tariffs)), None)


def set_tariffs(database: Database, tariffs: Tariffs | None) -> None:
    """Sets the tariffs of a pool, which its controller follows within seconds; None removes them."""
    now_s = Journal(database, batch="").clock()

    def replaced(former: Tariffs | None) -> Tariffs | None:
        return None if tariffs is None and former is None else (tariffs or Tariffs()).replacing(former, now_s=now_s)

    change_feature(database, Tariffs, replaced)
