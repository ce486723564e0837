"""Private and undocumented names of transformers."""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

MODELS = "transformers.models."
Replacement = tuple[ModuleType, str, Callable[..., object]]
"""A module, the name in it, and what takes its place."""

MODEL_CONSTRUCTION = threading.RLock()
"""Is held by the thread that makes or loads a model, of which there may be one at a time in a process.

`from_pretrained` replaces a method of the class of all models while it loads (`no_tie_weights`). Without the lock, what
another thread makes meanwhile has weights that are not tied, and so has every later model of the process where two
threads load at a time: the second one takes the replacement for the method, and puts it back.
"""

# -- the implementation of attention -----------------------------------------------------------------------------------
# Configs take `attn_implementation` when they are made, models have `set_attn_implementation`: neither reads it, nor
# sets it in the config of a model that does not exist yet.


def attention_of(config: Any) -> str | None:
    """Returns the implementation of attention in a model's config, such as "sdpa"; None where it is not chosen.

    Without it there is no way to know which kernels a model has, and whether it took others, so none can be tried.
    """
    implementation: str | None = getattr(config, "_attn_implementation", None)
    return implementation


def set_attention(config: Any, implementation: str | None) -> None:
    """Sets the implementation of attention of models that are made from a config, and in the configs within it.

    Without it a job's `attention` has no effect.
    """
    config._attn_implementation = implementation


# -- what does not work without values ---------------------------------------------------------------------------------


def replacements_without_values() -> list[Replacement]:
    """Returns what estimates of memory replace, since tensors without values are taken for those of a tracer.

    The check of grouped matrix products takes bf16 alone then; without its replacement no estimate runs a mixture of
    experts. Masks are made differently under tracing; without its replacement they are larger than in training.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    return [(moe, "_can_use_grouped_mm", lambda *_: False), (masking_utils, "is_tracing", lambda *_: False)]


# -- speech ------------------------------------------------------------------------------------------------------------


def num_frames_of(model: Any, num_samples: Any) -> Any:
    """Returns the number of frames that a model of speech makes of recordings with these numbers of samples, a tensor.

    Its own CTC loss is computed with it. Without it the loss would read the frames of padding as speech.
    """
    return model._get_feat_extract_output_lengths(num_samples)


def span_mask_functions() -> list[Replacement]:
    """Returns the functions of loaded models that draw the spans which SpecAugment masks, from numpy's generator.

    Without their replacement the masks of a row depend on the rows before it in its micro-batch.
    """
    name = "_compute_mask_indices"
    loaded = [module for key, module in list(sys.modules.items()) if key.startswith(MODELS)]
    return [(module, name, vars(module)[name]) for module in loaded if name in vars(module)]


# -- imports -----------------------------------------------------------------------------------------------------------
# Base classes of models import other libraries where they are installed: SciPy for losses of object detection, torchao
# for one kind of quantized model, and, by way of accelerate, boto3 for SageMaker: a fifth of a fork server's start.

SELDOM_USED = ("boto3", "scipy.optimize", "torchao.prototype.safetensors.safetensors_support")


def import_models() -> None:
    """Imports the base classes of models. Functions of `SELDOM_USED` are imported when they are called.

    Without it a fork server takes a second longer, and prints what torchao cannot load.
    """
    with _imported_when_called(*SELDOM_USED):
        importlib.import_module("transformers.modeling_utils")


@contextmanager
def _imported_when_called(*modules: str) -> Iterator[None]:
    """What is imported in this context from modules that are not loaded yet is a function that imports it at a call."""
    stand_ins = {name: _StandIn(name) for name in modules if name not in sys.modules}
    stand_ins = {name: each for name, each in stand_ins.items() if "." in name or each.__spec__ is not None}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = None if "." in name else find_spec(name)  # a spec below a package would import the package

    def __getattr__(self, attribute: str) -> Callable[..., Any]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *args, **kwargs: getattr(importlib.import_module(self.__name__), attribute)(*args, **kwargs)


# -- exports -----------------------------------------------------------------------------------------------------------


def fill_caches() -> None:
    """Makes the table of the names of all architectures' weights, which each process makes anew at its first export.

    Without it every rank that exports a model takes .1 s longer.
    """
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")


# -- Trainer -----------------------------------------------------------------------------------------------------------
# Scripts with a Trainer become jobs without a change in them: the job decides when and where checkpoints are written.
# Callbacks may request a checkpoint, but not its path, and none is called before.


def checkpoint_methods(trainer_class: Any) -> tuple[Callable[..., None], Callable[..., bool]]:
    """Returns the methods by which a Trainer writes a checkpoint, and decides whether its model is the best so far."""
    return trainer_class._save_checkpoint, trainer_class._determine_best_metric


def replace_checkpoint_methods(
    trainer_class: Any, *, save: Callable[..., None], determine_best: Callable[..., bool]
) -> None:
    """Replaces the methods that `checkpoint_methods` returns.

    Without it an adopted script writes its checkpoints where no job finds them.
    """
    trainer_class._save_checkpoint, trainer_class._determine_best_metric = save, determine_best


def set_rows_per_device(trainer: Any, num_rows: int) -> None:
    """Sets the rows of a device's batch after a Trainer was made, which has noted those of its arguments.

    Without it the number of devices changes the global batch of an adopted script.
    """
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = num_rows


def save_model_here(trainer: Any, folder: str | Path) -> None:
    """Saves a Trainer's model in a folder, and there alone.

    Without the undocumented argument a Trainer with `push_to_hub` also uploads it.
    """
    trainer.save_model(folder, _internal_call=True)
