"""The thread that computes what the clients of one base ask for: requests that wait at the same time go together.

Each client's requests are computed in the order of their numbers, and each answer is stored before anybody gets it. A
request of many rows is computed in pieces that depend on that request alone, and a sample in turns of a few tokens, so
that others wait for a piece or a turn at most.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.errors import RingmasterError
from ringmaster.features.endpoint.server.compute_link import CallFailed, ComputeLink, ComputeProcessDied
from ringmaster.features.endpoint.server.pending_request import (
    SAMPLE_TOKENS,
    PendingRequest,
    pieces_of,
    sample_of,
    within_sequences,
)
from ringmaster.features.endpoint.server.shares import FairShares, RequestStream, within_budget
from ringmaster.features.endpoint.server.store import (
    ClientCheckpoint,
    EndpointRequestKind,
    EndpointStore,
    RequestState,
    StoredRequest,
    StoredSampler,
)

logger = logging.getLogger(__name__)

TURN_TOKENS = 32_768  # of one computation of several clients
MAX_DEATHS = 3  # of the process during one computation, after which its requests fail
MAX_SNAPSHOTS = 16  # unnamed checkpoints for sampling that are kept of a client
END_TIMEOUT_S = 5.0
COMPUTED = (EndpointRequestKind.LOSS, EndpointRequestKind.SAMPLE)


class BaseScheduler:
    """Computes the requests to one base.

    on_answer: called with a request once its answer is stored, from this thread.
    """

    def __init__(
        self,
        base: str,
        *,
        store: EndpointStore,
        link: ComputeLink,
        on_answer: Callable[[StoredRequest], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = base
        self._store, self._link, self._on_answer, self._clock = store, link, on_answer, clock
        self._wakeup = threading.Condition()
        self._streams: dict[str, RequestStream[PendingRequest]] = {}
        self._calls: list[tuple[Callable[[ComputeLink], Any], threading.Event, list[Any]]] = []
        self._cancelled: set[str] = set()
        self._shares = FairShares()
        self._last_kind: EndpointRequestKind | None = None
        self._is_ending = self._has_ended = False
        self._is_linked = False
        self._was_linked = False  # ever; what waits before that is kept for a server that can start
        self._num_deaths = 0  # of the process, since the last answer
        self.fault: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"endpoint {base}", daemon=True)

    # Called from the threads of the server.

    def start(self) -> None:
        """Takes up the requests that were waiting when the server ended, and begins to compute."""
        for stream, seq in self._store.first_seqs(self.base).items():
            self._streams[stream] = RequestStream(next_seq=seq)
        for request in self._store.requests(self.base, RequestState.REFUSED):
            self.refuse(request)
        for request in self._store.requests(self.base, RequestState.WAITING):
            self.submit(request)
        self._thread.start()

    def submit(self, request: StoredRequest) -> None:
        """Adds a request that is stored."""
        with self._wakeup:
            stream = self._stream(request)
            stream.refused.discard(request.seq)
            stream.waiting[request.seq] = PendingRequest(request)
            self._wakeup.notify_all()

    def refuse(self, request: StoredRequest) -> None:
        """Notes that no request of this number comes, unless a corrected one does."""
        with self._wakeup:
            self._stream(request).refused.add(request.seq)
            self._wakeup.notify_all()

    def cancel(self, request: StoredRequest) -> None:
        """Answers a sampling request that has not begun with a failure."""
        with self._wakeup:
            self._cancelled.add(request.id)
            self._wakeup.notify_all()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; an error of its own ends it."""
        return self._thread.is_alive()

    def num_waiting(self) -> int:
        """Returns how many requests wait."""
        with self._wakeup:
            return sum(len(stream.waiting) for stream in self._streams.values())

    def call(self, act: Callable[[ComputeLink], Any]) -> Any:
        """Returns what a function of the link returns, called between computations; raises what it raises.

        Raises ComputeProcessDied where the thread has ended, or ends before.
        """
        done, result = threading.Event(), list[Any]()
        with self._wakeup:
            self._calls.append((act, done, result))
            if self._has_ended:
                self._refuse_calls(ComputeProcessDied("the thread of the base has ended"))
            self._wakeup.notify_all()
        done.wait()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def end_start(self) -> None:
        """Ends the thread and the process where the base is still being loaded: nothing was computed."""
        with self._wakeup:
            if self._was_linked:
                return
            self._is_ending = True
            self._wakeup.notify_all()
        self._link.kill()

    def end(self) -> None:
        """Ends the thread after the computation that runs, if that ends soon, and the process."""
        self.end_start()
        with self._wakeup:
            self._is_ending = True
            self._wakeup.notify_all()
        if self._thread.is_alive():
            self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():  # what is computed is not answered, and computed by the next server
            self._link.kill()
            self._thread.join()
        self._link.close()

    # The thread.

    def _stream(self, request: StoredRequest) -> RequestStream[PendingRequest]:
        if request.stream not in self._streams:
            is_ordered = request.kind is not EndpointRequestKind.SAMPLE
            self._streams[request.stream] = RequestStream(next_seq=0 if is_ordered else None)
        stream = self._streams[request.stream]
        if request.kind is EndpointRequestKind.SAMPLE:
            stream.next_seq = None
        return stream

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._wakeup:
                self._has_ended = True
                self._refuse_calls(ComputeProcessDied("the thread of the base has ended"))

    def _work(self) -> None:
        while True:
            with self._wakeup:
                while not (self._is_ending or self._calls or (self._may_compute() and self._ready())):
                    self._wakeup.wait()
                if self._is_ending:
                    return
            try:
                self._link_up()
                self._answer_calls()
                self._turn()
            except ComputeProcessDied as error:
                logger.warning("%s: %s", self.base, error)
                self._is_linked = False
                self._num_deaths += 1
                if self._num_deaths > MAX_DEATHS:
                    self._fail_all(f"{error}, {self._num_deaths} times without an answer")
            except CallFailed as error:  # of the start, or of the state of all clients
                self._fail_all(str(error))

    def _refuse_calls(self, error: RingmasterError) -> None:
        with self._wakeup:
            calls, self._calls = self._calls, []
        for _, done, result in calls:
            result.append(error)
            done.set()

    def _fail_all(self, reason: str) -> None:
        self.fault = reason
        self._refuse_calls(CallFailed(reason))
        for pending in self._ready() if self._was_linked else ():
            self._finish(pending, {"error": reason, "category": "server"}, has_failed=True)

    def _may_compute(self) -> bool:
        """Whether the first start has not failed: after that, only calls try it again."""
        return self._was_linked or self.fault is None

    def _ready(self, *kinds: EndpointRequestKind) -> list[PendingRequest]:
        """Returns the requests whose turn it is, of some kinds or of all."""
        with self._wakeup:
            every = [stream.waiting[seq] for stream in self._streams.values() for seq in stream.ready()]
        return [each for each in every if not kinds or each.request.kind in kinds]

    def _link_up(self) -> None:
        """Starts the process where there is none, and computes again the gradients that the last one had."""
        if self._is_linked:
            return
        self._link.start()
        self._link.call("forget_gradients", client=None)  # some of them may be of requests that were not answered
        states = self._link.call("clients")
        live = {each.id: each for each in self._store.clients(where="base = ? AND NOT is_ended", values=(self.base,))}
        for name in states.keys() - live.keys():
            self._link.call("remove", client=name)
        for name in live.keys() - states.keys():
            self._link.call("add", client=name, spec=live[name].spec)
        for pending in self._ready(EndpointRequestKind.STEP):  # done before: their gradients are used up
            state, step_before = states.get(pending.request.stream), pending.request.step_before
            if state is not None and step_before is not None and state["step"] > step_before:
                self._end_step(pending, _metrics(state), step=state["step"])
        self._regain(self._store.pending_gradients(self.base))
        self._is_linked = self._was_linked = True
        self.fault = None
        for pending in self._pending():
            pending.start_again()

    def _regain(self, answered: Iterable[StoredRequest]) -> None:
        """Computes again the gradients of losses that were answered and that no step has used.

        Raises CallFailed where they cannot be computed as they were, such as with a smaller `seq_len`.
        """
        for request in answered:
            for piece in pieces_of(request):
                (result,) = self._link.call("compute", requests=[{"client": request.stream, **piece}])
                if "refusal" in result:
                    raise CallFailed(
                        f"the gradients of request {request.id}, which was answered, cannot be computed again: "
                        f"{result['refusal']}. To fix: serve with the limits that it was answered with"
                    )

    def _drop_pieces(self, client: str) -> None:
        """Drops the gradients of a client's loss that failed after some of its pieces were computed."""
        self._link.call("forget_gradients", client=client)
        self._regain(each for each in self._store.pending_gradients(self.base) if each.stream == client)

    def _pending(self) -> list[PendingRequest]:
        with self._wakeup:
            return [each for stream in self._streams.values() for each in stream.waiting.values()]

    def _answer_calls(self) -> None:
        for _ in range(len(self._calls)):
            act, done, result = self._calls[0]
            try:
                result.append(act(self._link))
            except (CallFailed, ValueError, OSError) as error:
                result.append(error)
            with self._wakeup:
                self._calls.pop(0)
            done.set()

    def _turn(self) -> None:
        """Does what takes no computation, and one computation."""
        for pending in self._ready():
            if pending.request.id in self._cancelled:
                self._finish(pending, {"error": "the request was cancelled", "category": "user"}, has_failed=True)
                if pending.is_begun:
                    self._sample_turn([])  # which gives it up
            elif pending.request.kind not in (*COMPUTED, EndpointRequestKind.STEP):
                self._do(pending)
        if steps := self._ready(EndpointRequestKind.STEP):
            self._step({each.request.stream: each for each in steps})
        if waiting := [*within_sequences(self._ready(*COMPUTED))]:
            self._compute(self._chosen(waiting))

    def _chosen(self, waiting: Sequence[PendingRequest]) -> list[PendingRequest]:
        """Returns the requests of the next computation, all of one kind. The kinds take turns where both may be."""
        order = {client: i for i, client in enumerate(self._shares.eligible({each.share_of for each in waiting}))}
        ranked = sorted((each for each in waiting if each.share_of in order), key=lambda each: order[each.share_of])
        kinds = list(dict.fromkeys(each.request.kind for each in ranked))
        kind = kinds[-1] if len(kinds) > 1 and kinds[0] is self._last_kind else kinds[0]
        self._last_kind = kind
        of_kind = [each for each in ranked if each.request.kind is kind]
        if suspects := [each for each in of_kind if each.num_deaths]:
            return suspects[:1]  # alone, as one of those that were computed when the process died may be the reason
        return within_budget(of_kind, cost=lambda each: each.num_tokens, budget=TURN_TOKENS)

    def _compute(self, batch: Sequence[PendingRequest]) -> None:
        act = self._loss_piece if batch[0].request.kind is EndpointRequestKind.LOSS else self._sample_turn
        total = sum(each.num_tokens for each in batch)
        began_s = self._clock()
        try:
            results = act(batch)
        except ComputeProcessDied as error:
            for each in batch:
                each.num_deaths += 1
                if each.num_deaths >= MAX_DEATHS:
                    self._num_deaths = 0
                    reason = f"the process that computes has died {MAX_DEATHS} times during this request: {error}"
                    self._finish(each, {"error": reason, "category": "server"}, has_failed=True)
            raise
        except CallFailed as error:
            results = [{"refusal": str(error), "category": "server"}] * len(batch)
        used_s = self._clock() - began_s
        with self._store.changes():
            for each, result in zip(batch, results, strict=True):
                own_s = used_s * each.num_tokens / total
                self._shares.add(each.share_of, own_s)
                self._take_result(each, result, used_s=own_s)
        self._tell(batch)
        for each, result in zip(batch, results, strict=True):
            was_refused = result is not None and "refusal" in result
            if was_refused and each.has_results and each.request.work.get("with_gradients"):
                self._drop_pieces(each.request.stream)

    def _take_result(self, pending: PendingRequest, result: Mapping[str, Any] | None, *, used_s: float) -> None:
        answer = pending.take(result, used_s=used_s)
        if answer is None:
            return
        has_failed = "error" in answer
        if pending.request.model is not None:
            self._store.note_use(
                pending.request.model,
                device_s=pending.used_s,
                num_tokens=pending.used_tokens,
                loss=None if has_failed else pending.request.work.get("loss"),
            )
        self._store_answer(pending, answer, has_failed=has_failed)

    def _loss_piece(self, batch: Sequence[PendingRequest]) -> list[Mapping[str, Any] | None]:
        """Computes a piece of each loss."""
        requests = [{"client": each.request.stream, **each.pieces[0]} for each in batch]
        results: list[Mapping[str, Any] | None] = self._link.call("compute", requests=requests)
        return results

    def _sample_turn(self, batch: Sequence[PendingRequest]) -> list[Mapping[str, Any] | None]:
        """Samples a few further tokens of each sample; None for one that goes on."""
        requests = {each.request.id: sample_of(each.pieces[0]) for each in batch}
        begun = [each.request.id for each in self._pending() if each.is_begun]
        results = self._link.call("sample", requests=requests, num_tokens=SAMPLE_TOKENS, begun=begun)
        return [results[each.request.id] for each in batch]

    def _step(self, steps: Mapping[str, PendingRequest]) -> None:
        """Does the optimizer steps. Those that the process did before it died are answered by `_link_up`."""
        states = self._link.call("clients")
        before = {name: states[name]["step"] if name in states else 0 for name in steps}
        with self._store.changes():
            for name, pending in steps.items():
                self._store.begin_step(pending.request.id, step=before[name])
                pending.request = replace(pending.request, step_before=before[name])
        values = [{"client": name, **pending.request.work} for name, pending in steps.items()]
        began_s = self._clock()
        try:
            results = self._link.call("step", steps=values)
        except CallFailed as error:
            results = [{"refusal": str(error), "category": "server"}] * len(steps)
        used_s = (self._clock() - began_s) / len(steps)
        for (name, pending), result in zip(steps.items(), results, strict=True):
            self._shares.add(name, used_s)
            if "refusal" in result:
                answer = {"error": result["refusal"], "category": result.get("category", "user")}
                self._finish(pending, answer, has_failed=True, drops_gradients=result.get("drops_gradients", False))
            else:
                self._end_step(pending, result, step=before[name] + 1)

    def _end_step(self, pending: PendingRequest, metrics: Mapping[str, float], *, step: int) -> None:
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        with self._store.changes():
            self._store.set_step(pending.request.stream, step)
            self._store_answer(pending, {"metrics": finite})
        self._tell([pending])

    def _do(self, pending: PendingRequest) -> None:
        """Does what concerns one client alone."""
        request, name = pending.request, pending.request.stream
        acts = {
            EndpointRequestKind.CREATE: self._create,
            EndpointRequestKind.SAVE: self._save,
            EndpointRequestKind.LOAD: self._load,
        }
        try:
            with_answer = acts[request.kind](name, request)
        except (CallFailed, ValueError, OSError) as error:
            self._finish(pending, {"error": str(error), "category": "user"}, has_failed=True)
        else:
            self._finish(pending, with_answer)

    def _create(self, name: str, request: StoredRequest) -> Mapping[str, Any]:
        self._link.call("add", client=name, spec=request.work["spec"])
        self._store.add_client(
            name,
            owner=request.owner,
            session=request.work["session"],
            base=self.base,
            name=request.work["name"],
            spec=request.work["spec"],
        )
        if (path := request.work.get("path")) is not None:
            try:
                self._load(name, request)
            except (CallFailed, ValueError, OSError):  # its place is free again
                self._link.call("remove", client=name)
                self._store.end_client(name)
                raise
            return {"type": "load_weights", "path": path, "model_id": name}
        return {"type": "create_model", "model_id": name}

    def _load(self, name: str, request: StoredRequest) -> Mapping[str, Any]:
        checkpoint = self._store.checkpoint(request.work["path"], owner=request.owner)
        if checkpoint is None:
            raise ValueError(f"there is no checkpoint {request.work['path']}")
        self._link.call("load", client=name, path=str(checkpoint.folder), with_optimizer=request.work["with_optimizer"])
        self._store.set_step(name, self._link.call("clients")[name]["step"])
        return {"type": "load_weights", "path": request.work["path"], "model_id": name}

    def _save(self, _: str, request: StoredRequest) -> Mapping[str, Any]:
        work, now_s, name = request.work, time.time(), str(request.model)
        client = self._store.client(name)
        assert client is not None, "its creation was answered"
        if work["is_final"] and client.step == 0:
            return self._remove(name)
        self._store.begin_overwrite(work["uri"])
        folder = self._link.call("save", client=name, name=work["folder"], with_optimizer=work["with_optimizer"])
        checkpoint = ClientCheckpoint(
            uri=work["uri"],
            owner=request.owner,
            model=name,
            base=self.base,
            folder=Path(folder),
            spec=client.spec,
            step=client.step,
            created_s=now_s,
            expires_s=None if work["ttl_s"] is None else now_s + work["ttl_s"],
            is_snapshot=work["sampler"] is not None,
            metadata=work.get("metadata") or {},
            num_bytes=sum(each.stat().st_size for each in Path(folder).rglob("*") if each.is_file()),
        )
        self._store.add_checkpoint(checkpoint)
        if work["is_final"]:
            return self._remove(name)
        if work["sampler"] is None:
            return {"type": work["type"], "path": work["uri"]}
        self._store.add_sampler(
            StoredSampler(
                id=work["sampler"],
                owner=request.owner,
                session=client.session,
                base=self.base,
                checkpoint=work["uri"],
            )
        )
        self._drop_snapshots(name)
        return {"type": work["type"], "sampling_session_id": work["sampler"]}

    def _remove(self, client: str) -> Mapping[str, Any]:
        """Removes a client that has ended. What it still waits for fails."""
        self._store.end_client(client)
        self._link.call("remove", client=client)
        stream = self._streams.get(client)
        for pending in [] if stream is None else [*stream.waiting.values()]:
            self._finish(pending, {"error": "the client has ended", "category": "user"}, has_failed=True)
        return {"type": "unload_model", "model_id": client}

    def _drop_snapshots(self, model: str) -> None:
        """Removes the unnamed checkpoints of a client but the newest."""
        snapshots = self._store.checkpoints(where="model = ? AND is_snapshot", values=(model,))
        for checkpoint in snapshots[MAX_SNAPSHOTS:]:
            self._store.remove_checkpoint(checkpoint)

    def _finish(self, pending: PendingRequest, answer: Mapping[str, Any], **how: bool) -> None:
        self._store_answer(pending, answer, **how)
        self._tell([pending])

    def _store_answer(self, pending: PendingRequest, answer: Mapping[str, Any], **how: bool) -> None:
        self._store.finish(pending.request, answer, **how)
        pending.pieces.clear()
        self._num_deaths = 0

    def _tell(self, batch: Sequence[PendingRequest]) -> None:
        """Takes answered requests from their streams, and tells who waits for them."""
        for pending in batch:
            if pending.pieces:
                continue
            with self._wakeup:
                stream = self._streams[pending.request.stream]
                stream.waiting.pop(pending.request.seq, None)
                self._cancelled.discard(pending.request.id)
                if stream.next_seq is not None:
                    stream.next_seq = max(stream.next_seq, pending.request.seq + 1)
                    stream.refused = {seq for seq in stream.refused if seq >= stream.next_seq}
            self._on_answer(pending.request)


def _metrics(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a client's last step, after which nothing was answered."""
    return {} if state["grad_norm"] is None else {"grad_norm": state["grad_norm"]}
