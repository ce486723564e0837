"""Profiles a batch on a pool: each kind of device on one node that has it, preferably on this machine."""

import platform
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import httpx
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Cancelling

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, NodeUnavailable
from ringmaster.flows import settings
from ringmaster.flows.batch.context import NodeContext, open_node_context
from ringmaster.flows.batch.flow_runs import for_prefect, notices
from ringmaster.flows.caller import Caller
from ringmaster.flows.pool.own_node import healthy, is_here
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.job_rules import usable_options
from ringmaster.tasks.pool.node_hooks import prepare_node
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus, Timeouts
from ringmaster.tasks.profiling.stage import ProfilingPolicy, ProfilingResult
from ringmaster.tasks.profiling.task import profile_task
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import BATCH, MEASURING_PROGRESS, TRIALS
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import UNTRUSTED
from ringmaster.text import Notice

LOOK_EVERY_S = 1.0
GONE = "it has left the pool"
UNVERIFIED = "only untrusted nodes serve. To fix: start a trusted one, which verifies their work too"
MAX_ATTEMPTS = 3  # failed measurements, on nodes that are lost or fail meanwhile


@flow(name="profile-node", flow_run_name="profile {key} on {node}", persist_result=False)
def profile_node(node: str, key: str) -> None:
    """Profiles the jobs of a batch on the node where it runs. Batches start it; nobody else needs to.

    Args:
        node: The node on which it runs.
        key: Id of the batch in the pool. Its facts hold the jobs, and receive their profiles.
    """
    address = settings.checked_pool()
    if address is None:
        raise InputError(["this flow is for the nodes of a pool. To fix: `ringmaster profile BATCH.yaml`"])
    with closing(Database(address.database)) as database:
        journal = Journal(database, batch=key)
        batch = Batch.from_json(journal.get(BATCH))
        with open_node_context(batch, home=settings.home(), caller=Caller()) as node_context:
            if not node_context.is_pool_node or node_context.cluster.nodes[0].name != node:
                raise InputError([f"this process does not run on {node}, or that node does not serve the pool now"])
            try:
                _measure(node_context, journal)
            except NodeUnavailable:
                return cast(None, Cancelled(message=GONE))


def profile_on_pool(batch: Batch, *, key: str, database: Database, caller: Caller) -> ProfilingResult:
    """Profiles the jobs of a batch under every kind of device of the pool that it may use.

    key: id of the batch in the pool; its journal holds the batch itself, and the profiles that were measured before,
        which are used as they are.
    caller: shows the progress.

    Raises InputError if the pool has no such devices.
    """
    journal, notice = Journal(database, batch=key), caller.view.notice
    failed: list[str] = []
    left: set[str] = set()
    measured: dict[str, ProfilingResult] = {}  # by this process
    while len(failed) < MAX_ATTEMPTS:
        nodes = one_of_each_kind(serving(batch, database, notice=notice), avoid=left.union(failed))
        missing = {kind: node for kind, node in nodes.items() if journal.get(f"profiled:{kind}") is None}
        elsewhere = {kind: _start(node.name, key, notice=notice) for kind, node in missing.items() if not is_here(node)}
        with _all_cancelled_on_error(elsewhere.values()):
            has_own = any(is_here(node) for node in missing.values())
            gone = _measure_here(batch, journal, measured, caller=caller) if has_own else {}
            waited = {missing[kind].name: _wait(run, missing[kind], database) for kind, run in elsewhere.items()}
        faults = gone | {name: fault for name, fault in waited.items() if fault}
        if not faults:
            stored = {k: from_json(ProfilingResult, journal.get(f"profiled:{k}")) for k in nodes if k not in measured}
            return merged({kind: (measured | stored)[kind] for kind in nodes})
        # A lost node does not mean an error of the batch, however often it happens, so it does not count as an attempt.
        left = {name for name, fault in faults.items() if name in gone or GONE in fault}
        failed += [name for name in faults if name not in left]
        notices(notice)(f"not measured: {'; '.join(f'{node}: {fault}' for node, fault in faults.items())}")
    raise RuntimeError(f"the jobs could not be measured, {len(failed)} times, on {', '.join(sorted(set(failed)))}")


def _measure_here(
    batch: Batch, journal: Journal, measured: dict[str, ProfilingResult], *, caller: Caller
) -> dict[str, str]:
    """Profiles the batch on this machine; returns the reason, by node, if it has left the pool.

    measured: gets the profiles, by kind of device.
    """
    with open_node_context(batch, home=settings.home(), caller=caller) as node_context:
        if not node_context.is_pool_node:  # it was one a moment ago
            return {platform.node(): GONE}
        try:
            measured[node_context.cluster.device_kind()] = _measure(node_context, journal)
        except NodeUnavailable as error:
            return {node_context.cluster.nodes[0].name: str(error)}
    return {}


def one_of_each_kind(nodes: Sequence[NodeRecord], *, avoid: set[str]) -> dict[str, NodeRecord]:
    """Returns, for each kind of device, the node to measure on: this machine, else the node with most of them.

    avoid: nodes that are chosen only if there is no other.
    """
    chosen: dict[str, NodeRecord] = {}
    for node in sorted(nodes, key=lambda n: (n.name not in avoid, is_here(n), len(healthy(n).devices))):
        chosen[Cluster(nodes=(healthy(node),)).device_kind()] = node
    return chosen


def merged(results: Mapping[str, ProfilingResult]) -> ProfilingResult:
    """Merges the profiles of the same jobs under each kind of device.

    A job that at least one kind can train has no fault. If there are several kinds, each profile names its kind.
    """
    first, *others = results.values()
    if not others and not next(iter(results)).endswith(UNTRUSTED):
        return first
    names = dict.fromkeys(job.name for profiled in results.values() for job in profiled.jobs)
    offered = dict.fromkeys((*names, *(name for profiled in results.values() for name in profiled.profiles)))
    jobs = {job.name: job for profiled in [*results.values()][::-1] for job in profiled.jobs}  # chunks of the first
    preflights = {name: preflight for profiled in results.values() for name, preflight in profiled.preflights.items()}
    profiles = {
        name: tuple(
            replace(profile, device_type=kind)
            for kind, profiled in results.items()
            for profile in profiled.profiles.get(name, ())
        )
        for name in offered
    }
    variants = {each.name: each for job in jobs.values() for each in job.with_variants()[1:]}
    for name, job in (jobs | variants).items():
        profiles[name] = usable_options(job, profiles.get(name, ()))
        if job.is_exact and profiles[name]:  # kernels of another kind of device have other bits
            kind = profiles[name][0].device_type.removesuffix(UNTRUSTED)
            profiles[name] = tuple(p for p in profiles[name] if p.device_type.removesuffix(UNTRUSTED) == kind)
    groups: dict[str, tuple[Profile, ...]] = {}
    for kind, profiled in results.items():
        for lead, own in profiled.groups.items() if not kind.endswith(UNTRUSTED) else ():
            groups[lead] = (*groups.get(lead, ()), *(replace(profile, device_type=kind) for profile in own))
    faults: dict[str, str] = {}
    for name in dict.fromkeys((*(name for profiled in results.values() for name in profiled.faults), *names)):
        if not profiles.get(name):
            reported = [f"on {kind}: {each.faults[name]}" for kind, each in results.items() if name in each.faults]
            faults[name] = "; ".join(reported) or UNVERIFIED
    return ProfilingResult(
        jobs=tuple(jobs[name] for name in names),
        preflights=preflights,
        profiles=profiles,
        faults=faults,
        groups=groups,
        num_trials=sum(profiled.num_trials for profiled in results.values()),
    )


def _measure(node_context: NodeContext, journal: Journal) -> ProfilingResult:
    """Profiles the batch on this node; returns the profiles, and stores them in its journal."""
    show, node = node_context.caller.view.notice, node_context.cluster.nodes[0]
    kind = node_context.cluster.device_kind()
    for job in node_context.batch.jobs:
        prepare_node(job, cache_dir=str(node_context.environment.cache_dir), database=journal.database)

    def notice(text: str) -> None:
        show(text)
        journal.put(MEASURING_PROGRESS, f"{text}, on {node.name}")

    profiled = profile_task(
        node_context.batch.jobs,
        environment=node_context.environment,
        cluster=node_context.cluster,
        profile_store=node_context.profile_store,
        notice=notice,
        lend=node_context.lend,
        num_nodes=_num_alike(node, kind, NodeRegistry(journal.database)),
        policy=ProfilingPolicy(journal.get(TRIALS, ProfilingPolicy.NEEDED)),
        share=node_context.batch.profiling_share,
    )
    # The candidates are many and no longer needed.
    preflights = {name: replace(preflight, candidates=()) for name, preflight in profiled.preflights.items()}
    profiled = replace(profiled, preflights=preflights)
    journal.put(f"profiled:{kind}", to_json(profiled))
    return profiled


def _num_alike(node: Node, kind: str, nodes: NodeRegistry) -> int:
    """Returns over how many nodes like this one a gang may span: those that are there, or that the engine may lend."""
    serving = [(each, healthy(each)) for each in nodes.all() if each.status == NodeStatus.SERVING]
    alike = [
        each
        for each, own in serving
        if len(own.devices) == len(node.devices) and Cluster(nodes=(own,)).device_kind() == kind
    ]
    own = [each for each in alike if not each.allocation]
    is_lent = len(own) < len(alike)
    return max(len(alike), len(own) + nodes.most_lent() if is_lent else 0, 1)


def serving(batch: Batch, database: Database, *, notice: Notice) -> list[NodeRecord]:
    """Returns the nodes that the batch may use; waits for the first one.

    Raises InputError if there are nodes, but none with the devices that the batch requests.
    """
    kind = next(iter(batch.devices)) if isinstance(batch.devices, Mapping) else None
    reported = False
    while True:
        nodes = [
            node for node in NodeRegistry(database).all() if node.status == NodeStatus.SERVING and healthy(node).devices
        ]
        wanted = [node for node in nodes if kind in (None, node.devices[0].kind)]
        if wanted:
            return wanted
        if nodes:
            there = ", ".join(f"{node.name} ({len(node.devices)} {node.devices[0].kind})" for node in nodes)
            raise InputError([f"the batch requests devices of kind {kind}; the pool has {there}"])
        if not reported:
            notice(
                "waiting for a first node of the pool: an engine that lends nodes lends it, or a person starts "
                "`ringmaster pool worker`"
            )
            reported = True
        threading.Event().wait(LOOK_EVERY_S)


@contextmanager
def keeping_a_node(requests: Requests) -> Iterator[None]:
    """Inside the context, the controller keeps a node of an engine that lends some, on which a batch is profiled."""
    number = requests.ask(RequestKind.NODE, {"beats": 0})
    with requests.renewed(lambda: number, every_s=Timeouts.of_environment().beat_every_s):
        try:
            yield
        finally:
            requests.answer(number, status=RequestStatus.WITHDRAWN)


def _start(node: str, key: str, *, notice: Notice) -> FlowRun:
    """Starts a flow run that profiles the batch on a node."""
    parameters: dict[str, Any] = {"node": node, "key": key}
    notice(f"measuring on {node}")
    key = uuid.uuid4().hex  # a repeated request returns the same run
    run: Any = for_prefect(
        lambda: run_deployment(
            "profile-node/z-internal-profile-node",
            parameters=parameters,
            work_queue_name=f"node-{node}",
            timeout=0,
            idempotency_key=key,
        ),
        notice,
    )
    flow_run: FlowRun = run
    return flow_run


@contextmanager
def _all_cancelled_on_error(runs: Iterable[FlowRun]) -> Iterator[None]:
    """Cancels nodes' flow runs if the enclosed work ends by an exception: nobody waits for their measurements."""
    try:
        yield
    except BaseException:
        with suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
            for run in runs:
                client.set_flow_run_state(run.id, Cancelling(message="its batch is measured no more"))
        raise


def _wait(run: FlowRun, node: NodeRecord, database: Database) -> str:
    """Waits until a node's flow run has ended; returns what went wrong, with GONE if the node has left; else "".

    A run that had not begun when its node left the pool is cancelled, as no other node serves its queue.
    """
    clock = threading.Event()
    with get_client(sync_client=True) as client:
        while True:
            with suppress(httpx.HTTPError, PrefectException):  # the server is away, and is read again later
                state = client.read_flow_run(run.id).state
                if state is not None and state.is_final():
                    text = f"{state.name}: {state.message}"
                    return "" if state.is_completed() else text if _serves(node, database) else f"{GONE} ({text})"
                is_begun = state is not None and state.is_running()
                if not is_begun and node.name not in {each.name for each in NodeRegistry(database).all()}:
                    client.set_flow_run_state(run.id, Cancelled(message=GONE))
                    return GONE
            clock.wait(LOOK_EVERY_S)


def _serves(node: NodeRecord, database: Database) -> bool:
    """Returns whether the same worker serves a node still."""
    return any(
        each.status == NodeStatus.SERVING and (each.name, each.incarnation) == (node.name, node.incarnation)
        for each in NodeRegistry(database).all()
    )
