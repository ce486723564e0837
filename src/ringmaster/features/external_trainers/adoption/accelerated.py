"""Makes a training loop over Hugging Face's Accelerate a job, without a change in the script.

A step is a step of the optimizer that synchronizes gradients. A checkpoint is `Accelerator.save_state` at its end.

To resume, the script runs from its beginning, so that its own variables are as they were. The steps that were done
before are repeated without computing: the model is called once for each shape of its input, nothing is differentiated
and no parameter changes. At the end of the last of them the checkpoint is loaded. Every epoch's order of samples is as
before: the checkpoint has the random state at the beginning of the epochs that were under way.
"""

import random
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from accelerate import data_loader, optimizer, scheduler

from ringmaster.compat.accelerate import prepared_model
from ringmaster.features.external_trainers.adoption import TIMEOUT_S, numbers
from ringmaster.report import INSPECT, REPORTER

EPOCHS = "ringmaster_epochs.pt"


class AdoptedLoop:
    """The job of a training loop: its steps, its checkpoints, and the repetition of steps that were done before.

    num_repeated: the number of steps that the loop has repeated.
    """

    def __init__(self) -> None:
        self._accelerator: Any = None
        self._optimizer: Any = None
        self._loss: Any = 0.0
        self._folder = Path(REPORTER.order["restore_from"]) if REPORTER.order["restore_from"] else None
        self.num_repeated = 0
        self._epochs: dict[int, list[Any]] = {}  # of each data loader: number of the epoch, random state at its start
        self._loaders: list[Any] = []
        self._past: dict[int, list[Any]] = {}  # the same at the checkpoint

    @property
    def is_repeating(self) -> bool:
        """Whether the loop is at a step that was done before."""
        return self._folder is not None

    def take(self, accelerator: Any) -> None:
        """Takes the script's accelerator. Fails where there is nothing to hold on to."""
        if REPORTER.order["mode"] == INSPECT:
            REPORTER.fail("a loop over Accelerate does not define its number of steps. To fix: give --steps")
        self._accelerator = accelerator
        if self._folder is not None:
            self._past = torch.load(self._folder / EPOCHS, weights_only=True)

    def add_loss(self, loss: Any) -> None:
        """Adds the loss of a micro-batch, as its share of the step's loss."""
        self._loss += loss.detach() / self._accelerator.gradient_accumulation_steps

    def begin_epoch(self, loader: Any) -> None:
        """Keeps the random state at the beginning of an epoch, or restores that of an epoch that was under way."""
        if not any(loader is each for each in self._loaders):
            self._loaders.append(loader)
        index = next(i for i, each in enumerate(self._loaders) if each is loader)
        number = self._epochs.get(index, [0])[0] + 1
        if self.is_repeating and self._past.get(index, [0])[0] == number:
            set_random_state(self._past[index][1])
        self._epochs[index] = [number, random_state()]
        if not self.is_repeating:
            REPORTER.resume()

    def end_step(self, stepped: Any) -> None:
        """Reports a step, and writes a checkpoint where one is due; ends the process where the job is to stop."""
        self._optimizer = self._optimizer or stepped
        if stepped is not self._optimizer:
            REPORTER.fail("the script has two optimizers. To fix: use ringmaster.report in its loop (docs/commands.md)")
        if self._folder is not None:
            self.num_repeated += 1
            if self.num_repeated == REPORTER.step:
                self._accelerator.load_state(str(self._folder))
                self._folder = None
                REPORTER.resume()
                if REPORTER.step == REPORTER.num_steps:
                    self._export()
            return
        loss, self._loss = float(self._loss), 0.0
        REPORTER.report(step=REPORTER.step + 1, loss=loss)
        if REPORTER.should_save():
            with REPORTER.checkpoint() as folder:
                self._save(folder)
            if REPORTER.step == REPORTER.num_steps:
                self._export()

    def _save(self, folder: Path) -> None:
        project = self._accelerator.project_configuration
        names_itself, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        self._accelerator.save_state(str(folder))
        project.automatic_checkpoint_naming = names_itself
        if self._accelerator.is_main_process:
            torch.save(self._epochs, folder / EPOCHS)

    def _export(self) -> None:
        accelerator, folder = self._accelerator, REPORTER.order["export_to"]
        prepared = prepared_model(accelerator)
        model = accelerator.unwrap_model(prepared)
        if hasattr(model, "save_pretrained"):
            state = accelerator.get_state_dict(prepared)
            writes = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
            model.save_pretrained(folder, state_dict=state, **writes)
        else:
            accelerator.save_model(prepared, folder)
        REPORTER.say("model")
        REPORTER.say("phase", phase="the script after its training", patience_s=TIMEOUT_S)


def random_state() -> dict[str, Any]:
    """Returns the states of the random generators that samplers draw from, as `torch.load` reads them."""
    name, keys, *others = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *others],
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what `random_state` returned."""
    name, keys, *others = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *others))
    torch.set_rng_state(state["torch"])


def shortened(forward: Callable[..., Any], loop: AdoptedLoop) -> Callable[..., Any]:
    """Returns a model's `forward` that computes once for each shape of its input while the loop repeats steps."""
    outputs: dict[Any, Any] = {}

    @wraps(forward)
    def adopted_forward(*args: Any, **kwargs: Any) -> Any:
        if not loop.is_repeating:
            outputs.clear()
            return forward(*args, **kwargs)
        shapes = tuple(
            (name, tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value))
            for name, value in (*enumerate(args), *kwargs.items())
        )
        if shapes not in outputs:
            with torch.no_grad():
                outputs[shapes] = forward(*args, **kwargs)
        return outputs[shapes]

    return adopted_forward


def patch(module: ModuleType) -> None:
    """Changes `Accelerator` of accelerate.accelerator. A script with a Trainer is its Trainer's (`hugging_face`)."""
    loop = AdoptedLoop()
    REPORTER.say("phase", phase="preparing", patience_s=TIMEOUT_S)

    def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Puts `function`, which gets the method that it replaces, in front of a method of `owner`."""
        method = getattr(owner, name)

        @wraps(method)
        def adopted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if REPORTER.has_trainer:
                return method(self, *args, **kwargs)
            return function(method, self, *args, **kwargs)

        setattr(owner, name, adopted)

    def init(method: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        loop.take(self)

    def prepare_model(method: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        model = method(self, *args, **kwargs)
        if loop.is_repeating:
            model.forward = shortened(model.forward, loop)
        return model

    def backward(method: Any, self: Any, loss: Any, **kwargs: Any) -> None:
        if not loop.is_repeating:
            loop.add_loss(loss)
            method(self, loss, **kwargs)

    def log(method: Any, self: Any, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        REPORTER.last_metrics |= numbers(values)
        method(self, values, *args, **kwargs)

    def iterate(method: Any, self: Any) -> Iterator[Any]:
        loop.begin_epoch(self)
        yield from method(self)

    def step(method: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if not loop.is_repeating:
            method(self, *args, **kwargs)
        if self.gradient_state.sync_gradients:
            loop.end_step(self)

    def step_schedule(method: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if not loop.is_repeating:
            method(self, *args, **kwargs)

    replace(module.Accelerator, "__init__", init)
    replace(module.Accelerator, "prepare_model", prepare_model)
    replace(module.Accelerator, "backward", backward)
    replace(module.Accelerator, "log", log)
    replace(data_loader.DataLoaderShard, "__iter__", iterate)
    replace(data_loader.DataLoaderDispatcher, "__iter__", iterate)
    replace(optimizer.AcceleratedOptimizer, "step", step)
    replace(scheduler.AcceleratedScheduler, "step", step_schedule)
