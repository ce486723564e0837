"""Forecasts of the ends of a batch and its jobs, with intervals that contain the actual end in 90 % of all runs.

The rest of a plan is simulated once at the median speeds (`PlanSimulator`). That gives the order in which segments hold
devices. With d the draws of the posterior of all step times (`SpeedBeliefs.draws`), segment i ends at

    end_i(d) = max(end_k(d) over the segments k that i follows) + overhead_i + work_i exp(x_i(d) - median of x_i)

where i follows the segments before it on its devices, of its job, and of the jobs that its job depends on. All ends of
a draw are then stretched by one more factor, log-normal with `MIN_SPREAD` and the measurement error of the machine's
load, for what no profile contains, and by the change of the load that is expected (`load_ahead`). This is Monte Carlo
simulation of a project's schedule (van Slyke, Operations Research 11, 1963). The quantiles of the draws are those of
each end.

The errors of earlier runs correct them. Let e = log(actual / predicted makespan by the draws), and s its standard
deviation in the draws. Half of its variance is taken to be common to all runs of a batch:

    e_i ~ N(mu, tau s_i^2 / 2)      mu ~ N(0, tau s^2 / 2)      tau ~ scaled inverse chi-squared(NU, 1)

where mu is what runs have in common and tau is by how much the spreads s_1, ..., s_n that earlier runs stated were too
small or too large. This prior is conjugate (Gelman et al., Bayesian Data Analysis, 3rd edition, sections 3.3 and 14.2):
with k = 2 / s^2 + sum of 2 / s_i^2,

    m = sum of (2 e_i / s_i^2) / k      t = (NU + sum of (2 e_i^2 / s_i^2) - k m^2) / (NU + n)

the next error follows a Student t distribution with NU + n degrees of freedom, centre m and scale
sqrt(t (s^2 / 2 + 1 / k)). The centre shifts all ends, and the scale stretches their quantiles. A job's end has a
further error of its own, as jobs do not slow each other down equally: its variance is the mean square of what the
errors of jobs in earlier runs had beyond their batch's, with `MIN_SPREAD` counting for NU runs. Earlier errors are
taken to be errors of speeds: as the running batch measures its own, m fades with their variance. The module has no
clock and no I/O, and its random numbers have a fixed seed.

The *earliest* ends are certified: no plan ends a job before, as long as no step is quicker than the lower end of its
interval, `CERTAIN` standard deviations below its median (`EarliestEnds`). They follow from the runtimes by arithmetic.
"""

import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.tasks.execution.dispatch import DeviceId, in_steps
from ringmaster.tasks.execution.execution_events import COVERAGE, PredictedEnd, Prediction
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.bounds.bounds import certified_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s, only
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.problems.problem_parts import MIN_RUNTIME_S
from ringmaster.tasks.profiling.machine_load import MachineLoad, load_ahead
from ringmaster.tasks.profiling.speed_beliefs import SpeedBeliefs, SpeedErrors, errors_of
from ringmaster.techniques import Profile

NUM_DRAWS = 200
SPEEDS, SURROUNDINGS = 0, 1  # the seeds of the draws of speeds, and of the factor that stretches all ends
NU = 4  # the runs that the prior spread counts for
MIN_SPREAD = 0.1  # what no profile contains: records, evaluation during training, a machine that drifts
MIN_S = 1e-3  # until a job ends that is about to
SHARES = 10**6  # steps of a job of which only the plan is known: shares of its work
LATEST = 0.9  # the share of ends that are not after the latest end
Z, Z_LATEST = (NormalDist().inv_cdf(probability) for probability in ((1 + COVERAGE) / 2, LATEST))
MAX_ROWS = 4000  # scores of all classes that are passed to a later process
MAX_SCORES = 1000  # of ends of a class; the newest ones
NUM_BATCHES = 40  # with scores of a class of few ends, before those of all ends at that time are left for it
OVER = (0.03, 0.17, 0.36)  # shares of a batch's time that are over, between classes of predictions
PLACES = (0.3, 0.5, 0.65, 0.8)  # times left until an end over that of the last end, between classes
CERTAIN = 4.0  # standard deviations between the median of a runtime and its lower end: one in 30,000 is below

Draws = NDArray[np.float64]
OptionKey = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """An earlier run of a batch.

    error: the logarithm of its actual over its predicted makespan by the speeds alone.
    spread: the spread that was stated for it.
    job_error: the root mean square of its jobs' errors beyond that of the batch; None where it was not recorded.
    loads: of the machine, when it was planned and, where that is known, while it ran.
    """

    error: float
    spread: float
    job_error: float | None = None
    loads: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForecastConditions:
    """What determines a batch's makespan in addition to the speeds of its options.

    load: the load of the machine, which the plan contains.
    earlier: the errors of earlier runs.
    seen: loads of the machine since the batch began.
    """

    load: MachineLoad = field(default_factory=MachineLoad)
    earlier: Sequence[EarlierRun] = ()
    seen: Sequence[float] = ()


def _normals(*, seed: int) -> Callable[[], Draws]:
    """Returns a source of antithetic standard normal numbers: the second half of the draws mirrors the first.

    Numbers of different seeds are independent.
    """
    random = np.random.default_rng(seed)

    def draw() -> Draws:
        half = random.standard_normal(NUM_DRAWS // 2)
        return np.concatenate([half, -half])

    return draw


def seconds_left(
    ahead: PlanSimulator, beliefs: SpeedBeliefs, options: Mapping[OptionKey, tuple[str, SpeedErrors]]
) -> dict[str, Draws]:
    """Returns draws of the seconds until each job ends, by job; jobs that never end by the plan are left out.

    ahead: the rest of the plan at the median speeds; is simulated to its end.
    options: by job and option, the technique and the prior errors.
    """
    now_s, num_before = ahead.now_s, len(ahead.segments)
    ahead.finish()
    segments = sorted(ahead.segments[num_before:], key=lambda each: (each.starts_s, each.ends_s))
    used = {(each.stretch.segment.job, each.stretch.segment.option): None for each in segments}
    draws = beliefs.draws({key: options[key] for key in used}, normals=_normals(seed=SPEEDS))
    medians = {key: beliefs.of(*key, technique=options[key][0], errors=options[key][1]).mean for key in used}
    free: dict[DeviceId, Draws] = {}
    left: dict[str, Draws] = {}
    for each in segments:
        stretch = each.stretch
        segment, row = stretch.segment, ahead.problem.job(stretch.segment.job)
        before = [left.get(job) for job in (segment.job, *row.after)] + [free.get(device) for device in segment.devices]
        distinct = {id(draw): draw for draw in before if draw is not None}
        begins: Draws = np.full(NUM_DRAWS, max(row.release_s, segment.not_before_s - now_s))
        for draw in distinct.values():
            begins = np.maximum(begins, draw)
        key = segment.job, segment.option
        work_s = stretch.steps_end_s - stretch.works_from_s
        overhead_s = each.ends_s - max(each.starts_s, now_s) - work_s
        ends = begins + overhead_s + work_s * np.exp(draws[key] - medians[key])
        free |= dict.fromkeys(segment.devices, ends)
        left[segment.job] = ends
    ended = {job: draw for job, draw in left.items() if job in ahead.ended_s and ahead.ended_s[job] >= now_s}
    return ended | {member: draw for job, draw in ended.items() for member in ahead.problem.job(job).members}


class EndScores:
    """How late ends came that were predicted, where batches arrive and devices fail; corrects further predictions.

    The score of a prediction is the logarithm of the actual over the predicted seconds left. Quantiles of the newest
    scores of a class of predictions take the place of those of the draws: split conformal prediction (Papadopoulos et
    al., ECML 2002), class by class, which needs no model of what delays jobs. The class is how much of the batch's time
    is over, as more arrives after the begin, and where the end is among those of its batch: new plans move the last
    ends forward, and others back. Where a class has scores of too few batches, that of all ends at that time is used,
    and then the draws. As ends of one batch are late together, a probability p of k batches is taken at p (k + 1) / k
    (Dunn, Wasserman and Ramdas, Journal of the American Statistical Association 118, 2023).

    A job is scored by its first prediction and each time that half of what was left is over.

    rows: the newest scores of an earlier process, in order, each (*class, batch, score).
    """

    def __init__(self, rows: Iterable[Sequence[Any]] = ()) -> None:
        self.rows: deque[tuple[int, int, str, float]] = deque(maxlen=MAX_ROWS)
        self._scores: dict[tuple[int, ...], deque[tuple[str, float]]] = {}
        self._quantiles: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._predicted: dict[str, list[tuple[float, float, tuple[int, int], str]]] = {}
        for over, place, batch, score in rows:
            self._add((over, place), batch, score)

    def corrected(self, end: PredictedEnd, prediction: Prediction) -> PredictedEnd:
        """Returns the end of a prediction by what earlier ends have shown."""
        known = _class_of(end, prediction)
        quantiles = self._quantiles_of(known, least=NUM_BATCHES) or self._quantiles_of(known[:1])
        if not quantiles:
            return end
        made_s, least_s = prediction.made_s, prediction.made_s if end.earliest_s is None else end.earliest_s
        low_s, end_s, latest_s, high_s = (
            max(made_s + (end.end_s - made_s) * math.exp(score), least_s) for score in quantiles
        )
        return replace(end, end_s=end_s, low_s=low_s, high_s=high_s, latest_s=latest_s)

    def note(self, name: str, end: PredictedEnd, prediction: Prediction, *, batch: str) -> None:
        """Records an end as it was predicted, before it was corrected."""
        rows, left_s = self._predicted.setdefault(name, []), end.end_s - prediction.made_s
        if left_s > 0 and (not rows or left_s <= rows[-1][1] / 2):
            made_s = prediction.since_s + prediction.made_s
            rows.append((made_s, left_s, _class_of(end, prediction), batch))

    def close(self, name: str, ended_s: float | None) -> None:
        """Scores what has ended, in seconds since the epoch; None where it was stopped before its end."""
        for made_s, left_s, known, batch in self._predicted.pop(name, ()):
            if ended_s is not None and ended_s > made_s:
                self._add(known, batch, math.log((ended_s - made_s) / left_s))

    def _add(self, known: tuple[int, int], batch: str, score: float) -> None:
        self.rows.append((*known, batch, score))
        for key in (known, known[:1]):
            self._scores.setdefault(key, deque(maxlen=MAX_SCORES)).append((batch, score))
            self._quantiles.pop(key, None)

    def _quantiles_of(self, key: tuple[int, ...], *, least: int = 1) -> tuple[float, ...]:
        """Returns the scores of the low, the median, the latest and the high end of a class; none where it has few.

        least: the batches of which it must have scores; always as many as allow for a latest end.
        """
        if key not in self._quantiles:
            rows = self._scores.get(key, ())
            num_batches, scores = len({batch for batch, _ in rows}), [score for _, score in rows]
            sure = 1 + 1 / num_batches if rows else math.inf
            self._quantiles[key] = ()
            if num_batches >= least and sure * LATEST <= 1.0:
                high, latest = min((1 + COVERAGE) / 2 * sure, 1.0), LATEST * sure
                low, middle = np.quantile(scores, 1 - high, method="lower"), np.quantile(scores, 0.5)
                late = np.quantile(scores, [latest, high], method="higher")
                self._quantiles[key] = (float(low), float(middle), *map(float, late))
        return self._quantiles[key]


def _class_of(end: PredictedEnd, prediction: Prediction) -> tuple[int, int]:
    left_s = prediction.makespan_s - prediction.made_s
    place = (end.end_s - prediction.made_s) / left_s if left_s > 0 else 1.0
    return bisect(OVER, prediction.made_s / max(prediction.makespan_s, MIN_S)), bisect(PLACES, place)


def calibrated(prediction: Prediction, *, of_jobs: EndScores, of_batches: EndScores) -> Prediction:
    """Returns a prediction with all ends corrected by the scores of earlier ones."""
    end = of_batches.corrected(prediction.end, prediction)
    return replace(
        prediction,
        makespan_s=end.end_s,
        low_s=end.low_s,
        high_s=end.high_s,
        latest_s=end.latest_s,
        jobs={job: of_jobs.corrected(each, prediction) for job, each in prediction.jobs.items()},
    )


class EarliestEnds:
    """The seconds before which jobs cannot end, by whatever plan, on the devices of a problem.

    Each runtime is at its lower end: without a start, a save, an evaluation, an export and the step in progress, and
    `CERTAIN` standard deviations below its median, `MIN_SPREAD` included. A job that is stopped before its last step
    may end before. A job that is trained together with others has no earliest end, as they may have different numbers
    of steps.

    problem: what is left of each job at the median speeds.
    options: by job and option, the technique and the prior errors.
    fixed_s: by job and option, the seconds of it that may be over already, or be none.
    certificate: prices of a plan, which bound the end of several jobs together; any prices do.
    load: of the machine; it may end.
    """

    def __init__(
        self,
        problem: Problem,
        options: Mapping[OptionKey, tuple[str, SpeedErrors]],
        *,
        beliefs: SpeedBeliefs,
        fixed_s: Mapping[OptionKey, float] | None = None,
        certificate: Certificate | None = None,
        load: float = 1.0,
    ) -> None:
        known_s, self._certificate = fixed_s or {}, certificate
        jobs = []
        for job in problem.jobs:
            least: dict[tuple[object, ...], tuple[float, int]] = {}  # of options that differ in speed alone
            for k, option in enumerate(job.options):
                technique, errors = options[job.id, k]
                spread = beliefs.of(job.id, k, technique=technique, errors=errors).spread
                ratio = math.exp(-CERTAIN * math.hypot(spread, MIN_SPREAD)) / load
                runtime_s = max((option.runtime_s - known_s.get((job.id, k), 0.0)) * ratio, MIN_RUNTIME_S)
                is_running = job.running is not None and job.running.option == k
                extra = (option.startup_s, option.save_s, option.evaluate_s, option.host_memory_bytes, option.jobs)
                key = (is_running, option.device_type, option.slot, option.num_nodes, *extra)
                if key not in least or runtime_s < least[key][0]:
                    least[key] = runtime_s, k
            kept = [k for _, k in least.values()]
            running = job.running and replace(job.running, option=kept.index(job.running.option))
            quickest = tuple(replace(job.options[k], runtime_s=runtime_s) for runtime_s, k in least.values())
            jobs.append(replace(job, options=quickest, running=running))
        self.problem = replace(problem, jobs=tuple(jobs), switch_cost_s=0.0)

    @classmethod
    def of_profiles(
        cls,
        problem: Problem,
        profiles: Mapping[str, Sequence[Profile]],
        *,
        beliefs: SpeedBeliefs | None = None,
        certificate: Certificate | None = None,
        load: float = 1.0,
        silences_s: Mapping[str, float] | None = None,
    ) -> "EarliestEnds":
        """Returns the earliest ends where option k of a job is its profile k.

        silences_s: by job that runs, how old what is known of its steps is.
        """
        options, beliefs = options_of(profiles), beliefs or SpeedBeliefs()
        fixed_s = {}
        for job, job_profiles in profiles.items():
            for k, each in enumerate(job_profiles):
                technique, errors = options[job, k]
                step_s = each.step_s * beliefs.of(job, k, technique=technique, errors=errors).ratio()
                fixed_s[job, k] = each.startup_s + each.save_s + each.evaluate_s + each.export_s + step_s
                fixed_s[job, k] += (silences_s or {}).get(job, 0.0)
        return cls(problem, options, beliefs=beliefs, fixed_s=fixed_s, certificate=certificate, load=load)

    def of_jobs(self) -> dict[str, float]:
        """Returns the earliest end of each job (`earliest_ends_s`)."""
        grouped = {name for job in self.problem.jobs if job.members for name in (job.id, *job.members)}
        grouped |= {name for job in self.problem.jobs for o in job.options if o.jobs for name in (job.id, *o.jobs)}
        jobs = (
            replace(job, options=tuple(replace(o, runtime_s=MIN_RUNTIME_S) for o in job.options))
            if job.id in grouped
            else job
            for job in self.problem.jobs
        )
        ends_s = earliest_ends_s(replace(self.problem, jobs=tuple(jobs)) if grouped else self.problem)
        return ends_s | dict.fromkeys(grouped, 0.0)

    def of_last(self, names: Collection[str]) -> float:
        """Returns the earliest end of the last of some jobs, as the prices prove it (`certified_bound`)."""
        left = {job.id for job in self.problem.jobs}
        some = left.intersection(names)
        if some and self._certificate is not None:
            problem = self.problem if some == left else only(self.problem, some)
            with suppress(ValueError):  # prices of whole jobs cannot be checked on many devices
                return certified_bound(self._certificate.only(some), problem)
        return 0.0


def plan_left(
    problem: Problem,
    plan: Plan,
    profiles: Mapping[str, Sequence[Profile]],
    *,
    beliefs: SpeedBeliefs | None = None,
) -> dict[str, Draws]:
    """Returns draws of the seconds from the start of a plan to the end of each of its jobs.

    profiles: option k of a job is its profile k.
    """
    problem, leads = _waiting_for_leads(problem, plan)
    num_steps = {job.id: SHARES for job in problem.jobs}
    ahead = PlanSimulator(
        problem,
        in_steps(plan, num_steps=num_steps, steps_done={}),
        num_steps=num_steps,
        step_s=lambda job, option: problem.job(job).options[option].runtime_s / SHARES,
    )
    left = seconds_left(ahead, beliefs or SpeedBeliefs(), options_of(profiles))
    return left | {member: left[lead] for member, lead in leads.items() if lead in left}


def predict_plan(
    problem: Problem, plan: Plan, profiles: Mapping[str, Sequence[Profile]], *, conditions: ForecastConditions
) -> Prediction:
    """Returns the prediction for a plan that has not begun; option k of a job is its profile k."""
    least = EarliestEnds.of_profiles(problem, profiles, certificate=plan.certificate, load=conditions.load.ratio)
    return predict(
        plan_left(problem, plan, profiles),
        conditions=conditions,
        earliest_s=least.of_jobs(),
        earliest_last_s=least.of_last([job.id for job in problem.jobs]),
    )


def _waiting_for_leads(problem: Problem, plan: Plan) -> tuple[Problem, dict[str, str]]:
    """Returns the problem as jobs wait under a plan with groups, and the lead job of each member.

    A member has no segments: what depends on it waits for its lead job.
    """
    leads = {member: s.job for s in plan.segments for member in problem.job(s.job).options[s.option].jobs}
    jobs = tuple(
        replace(job, after=tuple(dict.fromkeys(leads.get(other, other) for other in job.after))) for job in problem.jobs
    )
    return (replace(problem, jobs=jobs) if leads else problem), leads


def options_of(profiles: Mapping[str, Sequence[Profile]]) -> dict[OptionKey, tuple[str, SpeedErrors]]:
    """Returns the technique and the prior errors of each option; option k of a job is its profile k."""
    return {
        (job, number): (profile.technique, errors_of(profile))
        for job, job_profiles in profiles.items()
        for number, profile in enumerate(job_profiles)
    }


def spread_of(left: Mapping[str, Draws]) -> float:
    """Returns the standard deviation of the logarithm of the seconds until the last job ends."""
    return float(np.std(np.log(_last(left))))


def predict(
    left: Mapping[str, Draws],
    *,
    earliest_s: Mapping[str, float] | None = None,
    earliest_last_s: float = 0.0,
    conditions: ForecastConditions | None = None,
    first_spread: float | None = None,
    since_s: float = 0.0,
    made_s: float = 0.0,
) -> Prediction:
    """Returns the prediction for jobs that end together as a batch.

    left: draws of the seconds until each job ends (`seconds_left`); at least one job.
    earliest_s, earliest_last_s: the seconds until the earliest ends of jobs and of the last of them (`EarliestEnds`).
    first_spread: `spread_of` the first forecast, if this is a later one.
    since_s: the batch's begin, in seconds since the epoch.
    made_s: the seconds from then to now.
    """
    about, known_s = conditions or ForecastConditions(), earliest_s or {}
    load, last = about.load, _last(left)
    speeds = spread_of(left)
    common = math.hypot(MIN_SPREAD, load.spread)
    seen = [*about.seen, *(ratio for run in about.earlier for ratio in run.loads)]
    ahead = load_ahead(load, seen, seconds=float(np.median(last)))
    change = math.log(ahead.ratio / load.ratio)
    spread = math.hypot(speeds, common)
    centre, half = corrected(spread, about.earlier)
    fade = 1.0 if not first_spread else min(1.0, speeds / first_spread) ** 2
    stretch = half / (Z * spread)
    factor = np.exp(common * _normals(seed=SURROUNDINGS)())
    rows = np.maximum([last, *left.values()], MIN_S) * factor
    quantiles = np.quantile(rows, [(1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2], axis=1).T.tolist()

    def end_of(row: int, *, least_s: float, own_spread: float = 0.0) -> PredictedEnd:
        low, median, high = quantiles[row]
        centre_s = max(median * math.exp(centre * fade + change), least_s)
        below, above = (
            math.hypot(stretch * math.log(quantile / median), Z * own_spread, Z * ahead.spread)
            for quantile in (low, high)
        )
        end = PredictedEnd(
            end_s=centre_s,
            low_s=max(centre_s * math.exp(-below), least_s),
            high_s=centre_s * math.exp(above),
            earliest_s=least_s,
            latest_s=max(centre_s * math.exp(above * Z_LATEST / Z), least_s),
        )
        return end.later(made_s)

    end = end_of(0, least_s=max([earliest_last_s, *known_s.values()]))
    own_spread = _own_spread(about.earlier)
    return Prediction(
        makespan_s=end.end_s,
        low_s=end.low_s,
        high_s=end.high_s,
        load=load.ratio,
        spread=spread,
        num_earlier=len(about.earlier),
        uncorrected_s=made_s + quantiles[0][1],
        jobs={
            job: end_of(row, least_s=known_s.get(job, 0.0), own_spread=own_spread)
            for row, job in enumerate(left, start=1)
        },
        since_s=since_s,
        made_s=made_s,
        earliest_s=end.earliest_s,
        latest_s=end.latest_s,
    )


def corrected(spread: float, earlier: Sequence[EarlierRun]) -> tuple[float, float]:
    """Returns the centre of the next run's error, and half of the interval's width, both as logarithms.

    `spread` and those of earlier runs exceed 0.
    """
    weights = [2 / run.spread**2 for run in earlier]
    precision = 2 / spread**2 + sum(weights)
    centre = sum(weight * run.error for weight, run in zip(weights, earlier, strict=True)) / precision
    squares = sum(weight * run.error**2 for weight, run in zip(weights, earlier, strict=True))
    freedom = NU + len(earlier)
    tau = max(NU + squares - precision * centre**2, 0.0) / freedom
    half = t_quantile((1 + COVERAGE) / 2, freedom=freedom) * math.sqrt(tau * (spread**2 / 2 + 1 / precision))
    return centre, half


def _own_spread(earlier: Sequence[EarlierRun]) -> float:
    """Returns the spread of a job's error beyond that of its batch."""
    squares = [run.job_error**2 for run in earlier if run.job_error is not None]
    return math.sqrt((NU * MIN_SPREAD**2 + sum(squares)) / (NU + len(squares)))


def job_error(prediction: Prediction, *, makespan_s: float, ends_s: Mapping[str, float]) -> float | None:
    """Returns the root mean square of the jobs' errors beyond that of the batch, as logarithms; None without jobs.

    ends_s: when jobs ended, in seconds since the epoch.
    """
    pairs = [
        (ends_s[job] - prediction.since_s, predicted.end_s)
        for job, predicted in prediction.jobs.items()
        if job in ends_s
    ]
    if makespan_s <= 0 or any(min(pair) <= 0 for pair in pairs) or not pairs:
        return None
    error = math.log(makespan_s / prediction.makespan_s)
    return math.sqrt(sum((math.log(ended_s / end_s) - error) ** 2 for ended_s, end_s in pairs) / len(pairs))


def errors_in(runs: Iterable[Mapping[str, float]]) -> list[EarlierRun]:
    """Returns the errors of earlier runs by their metrics; leaves out runs that stated no spread, or took no time.

    What a run took longer as the load of its machine changed is not an error of speeds.
    """
    earlier = []
    for run in runs:
        actual_s, spread = run.get("makespan_s", 0.0), run.get("prediction_spread", 0.0)
        predicted_s = run.get("uncorrected_makespan_s") or run.get("planned_makespan_s", 0.0)
        loads = tuple(load for key in ("machine_load", "run_load") if (load := run.get(key, 0.0)) >= 1)
        if min(actual_s, predicted_s, spread) > 0:
            change = loads[-1] / loads[0] if "run_load" in run and len(loads) == 2 else 1.0
            error = math.log(actual_s / predicted_s / change)
            earlier.append(
                EarlierRun(error=error, spread=spread, job_error=run.get("prediction_job_error"), loads=loads)
            )
    return earlier


def t_quantile(probability: float, *, freedom: int) -> float:
    """Returns a quantile of Student's t distribution with at least `NU` degrees of freedom, to 0.2 %.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5. SciPy's takes a second to import.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / math.pow(freedom, power) for power, term in enumerate(terms))


def _last(left: Mapping[str, Draws]) -> Draws:
    """Returns draws of the seconds until the last of the jobs ends."""
    last_draws: Draws = np.maximum.reduce(list(left.values()))
    return np.maximum(last_draws, MIN_S)
