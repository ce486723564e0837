"""A handwritten baseline without Ringmaster: the jobs of a batch file in a plain loop on this machine's cores.

    python benchmarks/by_hand.py BATCH.yaml --threads N [--job NAME]

With --job it is a script for one job, to be run once for each job, one after another; without, it is one script that
trains all jobs in one process. Models, data, order of samples, steps and evaluation are those of the batch. The loop is
plain PyTorch with the fused optimizer, and the weights of the finished model are saved as safetensors.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from ringmaster.tasks.batch import load_batch
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.training.bound_loss import bind_loss
from ringmaster.techniques.training.metric_totals import MetricTotals
from ringmaster.techniques.training.optimizers import build_optimizer


def train(job, *, cache: Path, models: Path) -> dict[str, float]:
    """Trains one job, evaluates it as often as the batch specifies, and saves it."""
    prepared = prepare(job.data, cache_dir=cache)
    training, held_out = open_data(job.data, cache_dir=cache, prepared=prepared)
    base = models / job.base if job.base else None
    model = build_model(job.model, data=prepared, seed=job.seed, weights_from=base)
    loss_function = bind_loss(job.loss, model, job.model)
    optimizer = build_optimizer(job, model.parameters())
    num_steps = job.num_steps or max(round(job.num_epochs * len(training) / job.global_batch_size), 1)
    job = type(job)(**{**vars(job), "num_steps": num_steps, "num_epochs": None})
    sampler = sampler_of(job, training)
    for step in range(num_steps):
        batch = fetch(training, sampler.indices(step))
        loss_sum, count = loss_function(model(**loss_function.forward_inputs(batch)), batch)
        (loss_sum / count).backward()
        if job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        every = job.evaluation.every_steps
        if every and (step + 1) % every == 0 and step + 1 < num_steps:
            evaluate(job, model, loss_function, held_out)
    metrics = evaluate(job, model, loss_function, held_out)
    model.save_pretrained(models / job.name)
    return metrics


@torch.no_grad()
def evaluate(job, model, loss_function, held_out) -> dict[str, float]:
    """Returns the job's metrics on as much held-out data as the batch specifies."""
    model.eval()
    metrics = MetricTotals(job.evaluation.metrics, loss=loss_function)
    size = job.global_batch_size
    num_rows = min(len(held_out), size * job.evaluation.max_batches)
    for first in range(0, num_rows, size):
        batch = fetch(held_out, list(range(first, min(first + size, num_rows))))
        output = model(**loss_function.forward_inputs(batch))
        metrics.add(output, batch)
    model.train()
    return metrics.result()


def main() -> None:
    """Trains the requested jobs; prints the seconds spent on training alone, and the metrics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batch_file", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--job")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.models.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    jobs = [job for job in load_batch(arguments.batch_file).jobs if arguments.job in (None, job.name)]
    metrics = {job.name: train(job, cache=arguments.cache, models=arguments.models) for job in jobs}
    print(json.dumps({"training_s": time.perf_counter() - started_s, "metrics": metrics}))


if __name__ == "__main__":
    main()
