"""The extras of the package: what a feature needs beyond `ringmaster run`, installed as `ringmaster-ml[EXTRA]`."""

from importlib.util import find_spec

from ringmaster.distribution import DISTRIBUTION

# The packages that an extra of pyproject.toml brings, by the names under which they are imported.
PACKAGES = {
    "gguf": ("gguf",),
    "images": ("PIL",),
    "kubernetes": ("prefect_kubernetes",),
    "lm-eval": ("lm_eval",),
    "pool": ("flask_wtf", "prometheus_client", "psycopg", "pythonjsonlogger"),
    "quantization": ("bitsandbytes",),
    "ray": ("ray",),
    "retrieval": ("faiss",),
    "s3": ("s3fs",),
    "serve": ("google.protobuf",),
    "signing": ("cryptography", "model_signing"),
    "speech": ("soundfile",),
    "sweep": ("optuna",),
    "tensorboard": ("tensorboard",),
    "torchao": ("torchao",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def install_command(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing_packages(extra: str) -> str:
    """Returns the packages of an extra that are not installed, separated by commas."""
    return ", ".join(package for package in PACKAGES[extra] if find_spec(package) is None)


def missing_extra(extra: str, *, feature: str) -> str | None:
    """Returns why a feature cannot be used and what to install; None where its extra is installed."""
    missing = missing_packages(extra)
    return f"{feature} needs {missing}, not installed. To fix: {install_command(extra)}" if missing else None


def require_extra(extra: str, *, feature: str) -> None:
    """Raises ValueError where the extra that a feature needs is not installed."""
    if fault := missing_extra(extra, feature=feature):
        raise ValueError(fault)
