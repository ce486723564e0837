"""Links inside MLflow's UI, and the markdown for them.

The UI routes behind "#", so a link without a host works on whatever address the server has. Without `workflowType` the
page would open in the layout for language-model applications, where runs are hard to find.
"""

from urllib.parse import quote

from ringmaster.text import markdown, storable


def experiment_path(experiment_id: str) -> str:
    """Returns the UI path of an experiment."""
    return _path("experiments", experiment_id)


def run_path(experiment_id: str, run_id: str) -> str:
    """Returns the UI path of a run."""
    return _path("experiments", experiment_id, "runs", run_id)


def artifact_path(experiment_id: str, run_id: str, path: str) -> str:
    """Returns the UI path of an artifact of a run."""
    return _path("experiments", experiment_id, "runs", run_id, "artifacts", *path.split("/"))


def logged_model_path(experiment_id: str, model_id: str) -> str:
    """Returns the UI path of a LoggedModel, with its files and metrics."""
    return _path("experiments", experiment_id, "models", model_id)


def model_version_path(name: str, version: int | str) -> str:
    """Returns the UI path of a version of a registered model."""
    return _path("models", name, "versions", str(version))


def picture(text: str, run_id: str, path: str) -> str:
    """Returns markdown for a picture among a run's artifacts, e.g. for a note, where `data:` URIs stay blank."""
    return f"![{markdown(text)}](get-artifact?path={quote(path)}&run_uuid={run_id})"


def link(text: str, path: str) -> str:
    """Returns a markdown link that shows `text`."""
    return f"[{markdown(text)}]({path})"


def _path(*parts: str) -> str:
    return "#/" + "/".join(quote(storable(part), safe="") for part in parts) + "?workflowType=machine_learning"
