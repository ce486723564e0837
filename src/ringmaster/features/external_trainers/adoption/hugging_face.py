"""Makes a script with Hugging Face's Trainer, or one of TRL's, a job, without a change in the script."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from ringmaster.compat.transformers import (
    checkpoint_methods,
    replace_checkpoint_methods,
    save_model_here,
    set_rows_per_device,
)
from ringmaster.features.external_trainers.adoption import TIMEOUT_S, numbers
from ringmaster.report import INSPECT, REPORTER


class AdoptedTraining(TrainerCallback):  # type: ignore[misc]
    """The job of a trainer: reports steps, and decides with all ranks when to save and when to stop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._losses: list[Any] = []  # of the step's micro-batches, each divided by their number
        self._is_due = self._is_due_by_script = False

    def add_loss(self, loss: Any) -> None:
        """Adds the loss of a micro-batch, as its share of the step's loss."""
        self._losses.append(loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks that the script and its job agree, before the first step."""
        if REPORTER.order["mode"] == INSPECT:
            batch_size = self._trainer.get_total_train_batch_size(args)
            REPORTER.say("plan", num_steps=state.max_steps, global_batch_size=batch_size)
            raise SystemExit(0)
        if state.max_steps != REPORTER.num_steps:
            REPORTER.fail(
                f"the script trains {state.max_steps} steps, and its job {REPORTER.num_steps}. "
                f"To fix: num_steps: {state.max_steps}"
            )
        REPORTER.resume()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops a training that was resumed after its last step: a trainer compares the two only after a step."""
        control.should_training_stop |= state.global_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports the step, and sets whether to save and to stop after it."""
        loss, self._losses = sum(self._losses), []
        if args.world_size > 1:
            loss = self._trainer.accelerator.reduce(loss, reduction="mean")
        REPORTER.report(step=state.global_step, loss=float(loss))
        self._is_due_by_script = control.should_save
        self._is_due = REPORTER.should_save()
        control.should_save |= self._is_due
        control.should_training_stop |= REPORTER.should_stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Keeps the metrics of training, such as rewards: they are the model's where the script evaluates nothing."""
        if logs and "loss" in logs:  # not its loss, an average since the last log: that of the step is known
            REPORTER.last_metrics |= numbers({name: value for name, value in logs.items() if name != "loss"})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **_: Any) -> None:
        """Reports the metrics of an evaluation."""
        if values := numbers(metrics):
            REPORTER.report(step=REPORTER.step, **values)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports that an evaluation continues."""
        REPORTER.say("beat")

    def saves_best(self, is_best: bool) -> bool:
        """Returns whether a script that saves only its best models saves this one, or the job requests it."""
        self._is_due_by_script = is_best
        return is_best or self._is_due

    def save(self, write: Callable[[], None]) -> None:
        """Writes the checkpoint of the job, the script's own, or both."""
        if self._is_due:
            self._is_due, begun_s = False, time.monotonic()
            folder = Path(REPORTER.order["save_to"])
            with changed(self._trainer.args, output_dir=str(folder), save_total_limit=None, push_to_hub=False):
                write()
            REPORTER.note_checkpoint(folder / f"checkpoint-{REPORTER.step}", seconds=time.monotonic() - begun_s)
            if not self._is_due_by_script:
                return
        if not REPORTER.is_trial:
            write()

    def finish(self) -> None:
        """Exports the model after the last step; ends the process where the job is stopped before, or only tried."""
        if REPORTER.should_stop() and not REPORTER.is_trial:
            REPORTER.end()
        begun_s = time.monotonic()
        save_model_here(self._trainer, REPORTER.order["export_to"])
        REPORTER.say("model", seconds=time.monotonic() - begun_s)
        if REPORTER.is_trial:
            if self._trainer.eval_dataset is not None:
                self._trainer.evaluate()
            REPORTER.end()
        REPORTER.say("phase", phase="the script after its training", patience_s=TIMEOUT_S)


@contextmanager
def changed(target: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of `target` for the time of the context."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)


def divide_batch(trainer: Any, global_batch_size: int) -> None:
    """Divides the job's global batch among the ranks. One rank trains with the batch size of the script.

    The job knows the global batch, the script that of a device: how many devices train it must not change the model.
    """
    args = trainer.args
    total = trainer.get_total_train_batch_size(args)
    num_rows, rest = divmod(args.train_batch_size * global_batch_size, total)
    if total != global_batch_size and (args.world_size == 1 or args.n_gpu > 1 or rest):
        REPORTER.fail(
            f"the script's global batch on {args.world_size} devices is {total}, and its job's {global_batch_size}. "
            f"To fix: global_batch_size: {total}"
        )
    set_rows_per_device(trainer, num_rows)


def patch(module: ModuleType) -> None:
    """Changes `Trainer` of transformers.trainer: what it and its subclasses train is the job."""
    trainer_class = module.Trainer
    init, train, training_step = trainer_class.__init__, trainer_class.train, trainer_class.training_step
    get_batch_samples = trainer_class.get_batch_samples
    save_checkpoint, determine_best = checkpoint_methods(trainer_class)
    trained: list[AdoptedTraining] = []
    REPORTER.say("phase", phase="preparing", patience_s=TIMEOUT_S)

    @wraps(init)
    def adopted_init(self: Any, *args: Any, **kwargs: Any) -> None:
        REPORTER.has_trainer = True
        init(self, *args, **kwargs)
        self.adopted_training = AdoptedTraining(self)
        self.add_callback(self.adopted_training)

    @wraps(train)
    def adopted_train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        order, training = REPORTER.order, self.adopted_training
        if trained:
            REPORTER.fail("the script trains twice, which checkpoints cannot distinguish. To fix: make two jobs of it")
        trained.append(training)
        self.args.save_only_model = self.args.ignore_data_skip = False  # else it could not continue as if never stopped
        if order["mode"] != INSPECT:
            divide_batch(self, order["job"]["global_batch_size"])
        if REPORTER.is_trial:
            self.args.output_dir = order["save_to"]
        # The script's own choice of a checkpoint does not count: the job knows which one is whole.
        result = train(self, order["restore_from"], *args, **kwargs)
        training.finish()
        return result

    @wraps(get_batch_samples)
    def adopted_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_ended = self.control.should_training_stop
        return ([], None) if has_ended else get_batch_samples(self, *args, **kwargs)

    @wraps(training_step)
    def adopted_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = training_step(self, *args, **kwargs)
        self.adopted_training.add_loss(loss)
        return loss

    @wraps(save_checkpoint)
    def adopted_save(self: Any, *args: Any, **kwargs: Any) -> None:
        self.adopted_training.save(lambda: save_checkpoint(self, *args, **kwargs))

    @wraps(determine_best)
    def adopted_best(self: Any, *args: Any, **kwargs: Any) -> bool:
        is_best: bool = determine_best(self, *args, **kwargs)
        training: AdoptedTraining = self.adopted_training
        return training.saves_best(is_best) if self.args.save_strategy == "best" else is_best

    trainer_class.__init__, trainer_class.train = adopted_init, adopted_train
    trainer_class.training_step, trainer_class.get_batch_samples = adopted_step, adopted_samples
    replace_checkpoint_methods(trainer_class, save=adopted_save, determine_best=adopted_best)
