"""Private names of accelerate."""

from typing import Any


def prepared_model(accelerator: Any) -> Any:
    """Returns the first model that a script has given to `Accelerator.prepare`.

    The accelerator has no public name for it. Without it the model of an adopted script is not exported.
    """
    return accelerator._models[0]
