"""Random planning problems for benchmarks and tests, in families that follow the workloads of the field's papers.

usage: python -m benchmarks.planning.families FAMILY [--seed N] > problem.json

A family is a kind of jobs and a cluster:
- `paper-txt`, `paper-img`, `paper-mixed`: the batches of the Saturn paper, fine-tunes of a few large models under
  several techniques.
- `gavel`: the many small data-parallel jobs of the Gavel traces.
- `scale`, `tiny`: mixes of all models, in large and small numbers.
- `multi`: `scale` with gangs over several nodes.
- `types`: `scale` on two types of devices.
- `sweep`: groups of twenty jobs with equal options, as in hyperparameter sweeps.
- `lora`: small adapters of a few base models, which may be trained together (fused).
- `adapters`: sweeps of adapters; where there are many jobs, two ordinary jobs for every three adapters.

Runtimes come from a model of each technique (below), with a few per cent of noise per option.
"""

import argparse
import json
import re
from dataclasses import dataclass, replace
from random import Random

from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob, PlanningNode


@dataclass(frozen=True)
class _Model:
    """A model to train.

    hours: training time on one device if the model fitted.
    fits: number of devices that its sharded state needs.
    scales: exponent of the speed-up with more devices.
    """

    name: str
    hours: float
    fits: int
    scales: float


_TEXT = (_Model("gpt2-1.5b", 9.0, 1, 0.62), _Model("gptj-6b", 38.0, 3, 0.80))
_IMAGE = (_Model("vitg-1.8b", 22.0, 2, 0.75), _Model("resnet-200m", 5.0, 1, 0.45))
_FAMILIES = {
    "tiny": (_TEXT + _IMAGE, False),
    "paper-txt": (_TEXT, False),
    "paper-img": (_IMAGE, False),
    "paper-mixed": (_TEXT + _IMAGE, False),
    "gavel": ((_Model("gavel", 7.0, 1, 0.5),), True),
    "scale": (_TEXT + _IMAGE, False),
    "multi": (_TEXT + _IMAGE, False),
    "types": (_TEXT + _IMAGE, False),
    "sweep": (_TEXT + _IMAGE, False),
    "lora": (_TEXT + _IMAGE, False),
    "adapters": (_TEXT + _IMAGE, False),
}
_DEFAULT_SHAPE = {
    "tiny": "6x4",
    "paper-txt": "12x8",
    "paper-img": "12x16",
    "paper-mixed": "24x32",
    "gavel": "24x8",
    "scale": "30x32",
    "multi": "16x64",
    "types": "30x32",
    "sweep": "100x64",
    "lora": "16x4",
    "adapters": "16x2",
}
_JOBS_A_CLASS = 20  # in `sweep`
_ADAPTERS_A_BASE, _WIDEST_GROUP = 4, 4  # in `lora`
_GROUP_SIZES, _FEW, _SWEEPS = (2, 4, 8, 16), 40, 3  # in `adapters`
_HET_NODES = (2, 2, 4, 8)


def families() -> list[str]:
    """Names that `draw` accepts; each may be followed by a shape, such as "-100x128" or "-12xhet"."""
    return sorted(_FAMILIES)


def draw(family: str, *, seed: int = 0, switch_cost_s: float | None = 60.0) -> Problem:
    """Returns a random problem of a family, such as "scale" or "scale-100x128" (jobs x devices).

    Equal arguments give equal problems. "het" instead of a number of devices gives nodes of 2, 2, 4 and 8 devices.
    Raises ValueError for an unknown family or shape.

    switch_cost_s: seconds; None for 5 % of the median runtime under each job's fastest option.
    """
    found = re.fullmatch(r"(?P<family>[a-z-]+?)(-(?P<jobs>\d+)x(?P<devices>\d+|het))?", family)
    if not found or found["family"] not in _FAMILIES:
        raise ValueError(f"unknown family {family!r}; there are {families()}, each with a shape such as -30x32")
    name = found["family"]
    num_jobs, devices = (found["jobs"] and (found["jobs"], found["devices"])) or _DEFAULT_SHAPE[name].split("x")
    random = Random(f"{family}/{seed}")
    sizes = _HET_NODES if devices == "het" else _node_sizes(int(devices))
    kinds = ("fast", "slow") if name == "types" else ("",)
    nodes = tuple(PlanningNode(f"n{i}", size, kinds[i % len(kinds)]) for i, size in enumerate(sizes))
    span = 4 if name == "multi" else 1
    if name == "lora":
        jobs = _adapters(max(1, int(num_jobs)), max(sizes), random)
    elif name == "adapters":
        jobs = _sweeps_of_adapters(max(1, int(num_jobs)), nodes, random)
    elif name == "sweep":
        kinds_of_jobs = [_draw_job(name, i, nodes, span, random) for i in range(-(-int(num_jobs) // _JOBS_A_CLASS))]
        jobs = tuple(
            replace(kinds_of_jobs[i // _JOBS_A_CLASS], id=f"{kinds_of_jobs[i // _JOBS_A_CLASS].id}-{i % _JOBS_A_CLASS}")
            for i in range(max(1, int(num_jobs)))
        )
    else:
        jobs = tuple(_draw_job(name, i, nodes, span, random) for i in range(max(1, int(num_jobs))))
    if len({node.device_type for node in nodes}) > 1:
        jobs = tuple(_on_both_types(job, random) for job in jobs)
    if switch_cost_s is None:
        fastest = sorted(min(option.runtime_s for option in job.options) for job in jobs)
        switch_cost_s = round(0.05 * fastest[len(fastest) // 2], 1)
    return Problem(f"{family}-{seed}", nodes, jobs, switch_cost_s)


def _node_sizes(num_devices: int) -> list[int]:
    if num_devices < 1:
        raise ValueError("a problem needs at least one device")
    full, rest = divmod(num_devices, 8)
    return [8] * full + ([rest] if rest else [])


def _draw_job(family: str, index: int, nodes: tuple[PlanningNode, ...], span: int, random: Random) -> PlanningJob:
    models, is_gavel = _FAMILIES[family]
    model = random.choice(models)
    largest = max(node.num_devices for node in nodes)
    if is_gavel:
        hours = model.hours * random.lognormvariate(-0.6, 1.1)
        sizes = [size for size in (1, 2, 4, 8) if size <= largest]
        scales = random.uniform(0.15, 0.75)
        options = [_option("ddp", size, hours / size**scales, random) for size in sizes]
        return PlanningJob(f"j{index}", tuple(options))
    batch = random.choice((16, 32, 64, 128))
    hours = model.hours * random.uniform(0.35, 1.3) * (batch / 64) ** 0.25
    scales = min(0.95, model.scales * random.uniform(0.9, 1.15) * (batch / 64) ** 0.08)
    sizes = list(range(1, largest + 1)) if span == 1 and largest > 4 else [1, 2, 4, 8]
    options = []
    for size in sizes:
        if size <= largest:
            options += _techniques(model, size, hours / size**scales, random)
    for num_nodes in (2, 4):
        if 1 < num_nodes <= min(span, len(nodes)):
            slow = 1.12 * 1.05**num_nodes
            wide = _techniques(model, largest * num_nodes, slow * hours / (largest * num_nodes) ** scales, random)
            options += [
                Option(o.technique, o.num_devices, o.runtime_s, num_nodes) for o in wide if o.technique != "spilling"
            ]
    return PlanningJob(f"j{index}-{model.name}-b{batch}", tuple(options))


def _on_both_types(job: PlanningJob, random: Random) -> PlanningJob:
    """Returns the job with every option on fast devices, and on slow ones at 1.6 to 2.6 times the runtime."""
    slower = random.uniform(1.6, 2.6)
    slow = (replace(o, device_type="slow", runtime_s=round(slower * o.runtime_s, 1)) for o in job.options)
    return replace(job, options=(*(replace(o, device_type="fast") for o in job.options), *slow))


def _adapters(num_jobs: int, largest: int, random: Random) -> tuple[PlanningJob, ...]:
    """Returns adapters of base models; some fill a device alone, others leave most of it idle.

    n adapters of one base that are trained together share its forward pass. They take fixed x the longest of them plus
    `fills` x the sum of all, instead of the sum. Adapters that are adjacent in length may be grouped, two to
    `_WIDEST_GROUP` at once.
    """
    jobs: list[PlanningJob] = []
    while len(jobs) < num_jobs:
        base, fills = random.choice(_TEXT), random.choice((0.3, 0.6, 0.98))
        count = min(_ADAPTERS_A_BASE, num_jobs - len(jobs))
        hours = sorted((base.hours * random.uniform(0.05, 0.2) for _ in range(count)), reverse=True)
        names = [f"j{len(jobs) + i}-{base.name}-lora" for i in range(count)]
        for i, name in enumerate(names):
            options = []
            for size in (size for size in (1, 2, 4, 8) if size <= largest):
                for width in range(1, min(_WIDEST_GROUP, count - i) + 1):
                    group = hours[i : i + width]
                    together = hours[i] if width == 1 else max(1.05 - fills, 0.1) * hours[i] + fills * sum(group)
                    option = _option("ddp", size, together / size**base.scales, random)
                    options.append(replace(option, jobs=tuple(names[i + 1 : i + width])))
            jobs.append(PlanningJob(name, tuple(options)))
    return tuple(jobs)


def _sweeps_of_adapters(num_jobs: int, nodes: tuple[PlanningNode, ...], random: Random) -> tuple[PlanningJob, ...]:
    """Returns one sweep of adapters, or more where there are many jobs.

    More than `_FEW` jobs make three sweeps on different bases, and two ordinary jobs for every three adapters. A step
    of a group takes `fixed_s`, plus `share_s` for each job that is not finished. Jobs of a sweep, in the order of their
    steps, are grouped by 2, 4, 8 and 16. Half of the sweeps have equal steps.
    """
    num_ordinary = 2 * num_jobs // 5 if num_jobs > _FEW else 0
    num_adapters, num_sweeps = num_jobs - num_ordinary, _SWEEPS if num_ordinary else 1
    jobs: list[PlanningJob] = []
    for i in range(num_sweeps):
        count = num_adapters // num_sweeps + (i < num_adapters % num_sweeps)
        step_s, gain = random.uniform(0.2, 0.6), random.uniform(1.0, 2.0)  # gain: limit for large groups
        fixed_s, share_s, start_s = step_s * (1 - 1 / gain), step_s / gain, random.uniform(5.0, 30.0)
        most, is_equal = random.randrange(2_000, 20_000), random.random() < 0.5
        steps = sorted((most if is_equal else random.randrange(most // 8, most) for _ in range(count)), reverse=True)
        names = [f"sweep{i}-{k}" for k in range(count)]
        options = {
            name: [Option("single", 1, round(start_s + step_s * n, 1))] for name, n in zip(names, steps, strict=True)
        }
        for size in _GROUP_SIZES:
            for k in range(0, count - size + 1, size):
                gang_step_s = start_s + fixed_s * steps[k] + share_s * sum(steps[k : k + size])
                others = tuple(names[k + 1 : k + size])
                options[names[k]].append(Option("shared_base", 1, round(gang_step_s, 1), jobs=others))
        jobs += [PlanningJob(name, tuple(options[name])) for name in names]
    return (*jobs, *(_draw_job("adapters", i, nodes, 1, random) for i in range(num_ordinary)))


def _techniques(model: _Model, size: int, hours: float, random: Random) -> list[Option]:
    """Returns the options that train the model on `size` devices: spilling always, the others where its state fits."""
    found = []
    if model.fits == 1:
        found.append(_option("ddp", size, hours, random))
    if size >= model.fits:
        found.append(_option("fsdp", size, hours * 1.12, random))
        if size >= 2:
            found.append(_option("pipeline", size, hours * (0.85 + 0.035 * size), random))
    found.append(_option("spilling", size, hours * (2.2 if size >= model.fits else 3.8), random))
    return found


def _option(technique: str, size: int, hours: float, random: Random) -> Option:
    return Option(technique, size, round(3600 * hours * random.uniform(0.96, 1.04), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help=f"one of {', '.join(families())}, with a shape such as -30x32")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(json.dumps(draw(chosen.family, seed=chosen.seed).to_json(), indent=1))


if __name__ == "__main__":
    main()
