"""Links inside MLflow's own UI, and the markdown around them.

The UI routes behind "#", so that a link without a host works on whatever address the server has.
"""

from collections.abc import Sequence
from urllib.parse import quote

DESCRIPTION_LIMIT = 5000  # characters; the column of a model version's description
_CHILDREN = "\n\n**Adapted further into**\n\n"


def experiment_path(experiment_id: str) -> str:
    """Where the UI shows an experiment."""
    return f"#/experiments/{quote(experiment_id, safe='')}"


def run_path(experiment_id: str, run_id: str) -> str:
    """Where the UI shows a run."""
    return f"{experiment_path(experiment_id)}/runs/{quote(run_id, safe='')}"


def logged_model_path(experiment_id: str, model_id: str) -> str:
    """Where the UI shows a LoggedModel, with its files and metrics."""
    return f"{experiment_path(experiment_id)}/models/{quote(model_id, safe='')}"


def model_version_path(name: str, version: int | str) -> str:
    """Where the UI shows a version of a registered model."""
    return f"#/models/{quote(name, safe='')}/versions/{version}"


def link(text: str, path: str) -> str:
    """A markdown link; brackets in `text` are escaped."""
    escaped = text.replace("[", "\\[").replace("]", "\\]")
    return f"[{escaped}]({path})"


def with_children(description: str, children: Sequence[str]) -> str:
    """`description` whose last section lists `children` (markdown, newest first), within DESCRIPTION_LIMIT.

    What a person wrote above that section stays. Children that do not fit are counted.
    """
    text = description.partition(_CHILDREN)[0]
    if not children:
        return text[:DESCRIPTION_LIMIT]
    room = DESCRIPTION_LIMIT - len(_CHILDREN) - len("\n- and 1000000 more")
    text = text[:room]
    lines: list[str] = []
    used = len(text)
    for child in children:
        used += len(child) + len("\n- ")
        if used > room:
            break
        lines.append(f"- {child}")
    if left_out := len(children) - len(lines):
        lines.append(f"- and {left_out} more")
    return text + _CHILDREN + "\n".join(lines)
