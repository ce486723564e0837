"""A frozen base with the adapters of many clients, which compute together and get the bits that each would get alone.

Requests of one client are computed in their order. Each is divided into blocks of rows that depend on it alone
(`row_blocks`); one block of every client at a time is computed by one forward and backward of the base
(`multi_adapter`), and each block's gradients are added to those that its client has summed up so far.

Every answered request is in a journal, and now and then every client's state is stored whole; so an endpoint that was
killed continues with the same bits.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ringmaster.features.endpoint.compute.batch_independence import independent_multiple
from ringmaster.features.endpoint.compute.client_adapter import OPTIMIZER_FILE, ClientAdapter, NonFiniteGradientsError
from ringmaster.features.endpoint.compute.client_costs import (
    ComputationTimes,
    adapter_bytes,
    available_bytes,
    used_bytes,
)
from ringmaster.features.endpoint.compute.client_folders import ClientFolders, StoredClient, check_name
from ringmaster.features.endpoint.compute.request_journal import RequestJournal
from ringmaster.features.endpoint.compute.requests import (
    AdamStep,
    AdapterSpec,
    ClientState,
    EndpointLimits,
    EndpointLostError,
    LossRequest,
    LossResult,
    Price,
    RequestRefusal,
    SampleResult,
    SamplingRequest,
)
from ringmaster.features.endpoint.compute.row_blocks import PaddedLength, RequestRowBlock, blocks_of
from ringmaster.features.endpoint.compute.sampler import NO_ADAPTER, TokenSampler, sampling_obstacle
from ringmaster.features.endpoint.compute.sampling_turns import SampledCheckpoints, SamplingTurns
from ringmaster.features.endpoint.compute.token_losses import TARGETS, loss_obstacle
from ringmaster.files import storage_fault
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_adapter
from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.multi_adapter.parameter_rows import lay_below
from ringmaster.techniques.training.gradients import round_weights
from ringmaster.text import message_of

logger = logging.getLogger(__name__)

BF16 = "bf16"
STORED_PRECISIONS = {"fp32": "fp32", BF16: "bf16-params"}
"""The precisions of a base, as `MultiAdapterBase.compute_in` names them."""
STORING_SHARE = 0.02
"""The largest share of the time in which whole states are stored."""
FIRST_STORING_S = 0.1
NOTHING = PreparedData(
    name="serving", digest="", num_samples=0, num_held_out=0, kind="other", source="serving"
)  # of a base that is read from a folder, data determine nothing


class Endpoint:
    """The adapters of an endpoint's clients on one base. All methods are called by one thread.

    base: a folder or the name of a model on the hub, or the model as batch files describe it.
    folder: where the clients' states and checkpoints are kept; those that it holds already are restored.
    device: such as "cpu" or "cuda:0".
    precision: "fp32", or "bf16": the base is stored and computed in bf16, the adapters are stored in fp32.
    Raises ValueError where the base cannot be served.
    """

    def __init__(
        self,
        *,
        base: str | ModelSpec,
        limits: EndpointLimits,
        folder: Path,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.limits, self._device = limits, torch.device(device)
        self._base = base if isinstance(base, ModelSpec) else ModelSpec(from_pretrained=base)
        model: Any = build_model(self._base, data=NOTHING, seed=0)
        if precision == BF16:
            round_weights(model)  # before the device gets them: in fp32 they may not fit
        model = model.to(self._device).eval()
        self._stem = MultiAdapterBase(model)
        self._stem.compute_in(STORED_PRECISIONS[precision])
        if not (self._stem.packs and self._stem.divides_head):
            raise ValueError(
                f"serve: {type(model).__name__} cannot be served: its layers mix tokens of different samples, or its "
                "head cannot be computed by itself. To fix: give a causal language model with full attention"
            )
        self._num_tokens: int = model.get_input_embeddings().num_embeddings
        max_positions = num_positions(model.config) or limits.seq_len
        if max_positions < limits.seq_len:
            raise ValueError(
                f"serve: seq_len is {limits.seq_len}, and {type(model).__name__} has {max_positions} positions. "
                f"To fix: set at most {max_positions}"
            )
        self._multiple = independent_multiple(self._stem, max_rank=limits.max_rank, max_positions=max_positions)
        if self._multiple is None:
            logger.warning("clients are computed one after another: in a batch, their last digits depend on each other")
        self._padded = PaddedLength(multiple=self._multiple or 1, max_positions=max_positions)
        self._adapters: dict[str, ClientAdapter] = {}
        self._times = ComputationTimes()
        self._sampler = TokenSampler(
            self._stem, padded=self._padded, seq_len=limits.seq_len, tokenizer_from=self._base.from_pretrained
        )
        self._checkpoints = SampledCheckpoints(self._stem, device=self._device, max_kept=2 * limits.max_adapters)
        self._turns = SamplingTurns(self._sampler, modules_of=self._sampled_modules, is_together=self.batches)
        self._folders, self._journal = ClientFolders(folder), RequestJournal(folder)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="endpoint's disk")
        self.busy_s = self.storing_s = 0.0
        self._computed_s, self._storing_s = 0.0, FIRST_STORING_S  # since the last whole states, and what these took
        self._restore()

    @property
    def batches(self) -> bool:
        """Whether clients are computed together; else one after another, as their bits would depend on each other."""
        return self._multiple is not None

    def close(self) -> None:
        """Stores every client's state whole."""
        self._store_all()
        self._journal.close()
        self._disk.shutdown()

    # -- clients -------------------------------------------------------------------------------------------------------

    def clients(self) -> Mapping[str, ClientState]:
        """Returns the clients by name."""
        return {
            name: ClientState(spec=each.spec, step=each.step, grad_norm=each.grad_norm)
            for name, each in self._adapters.items()
        }

    def add(self, client: str, spec: AdapterSpec) -> None:
        """Adds a client. Raises ValueError where a limit is reached, or the adapter does not apply to the base."""
        check_name(client, what="client")
        if client in self._adapters:
            raise ValueError(f"client: {client} is there already. To fix: take another name")
        self._check_fits(spec)
        adapter = ClientAdapter(spec, self._stem.model)
        self._folders.add(client, StoredClient(spec=spec, number=self._journal.number))
        self._join(client, adapter)

    def remove(self, client: str) -> None:
        """Removes a client; its checkpoints stay. Raises ValueError where there is none of this name."""
        self._known(client)
        self._folders.remove(client)
        del self._adapters[client]
        self._lay_out()

    def price(self, spec: AdapterSpec) -> Price:
        """Returns what one more client with such an adapter costs. Raises ValueError where `add` would.

        Seconds are those of rows as the clients have sent them; before they have sent any, of one row of `seq_len`
        tokens for each client, which is computed for it.
        """
        self._check_fits(spec)
        if not self._times.can_predict:
            self._time_rows(spec)
        num = len(self._adapters)
        return Price(
            step_s_now=self._times.seconds_of(num),
            step_s_after=self._times.seconds_of(num + 1),
            memory_bytes_after=self._bytes_with(spec),
            memory_bytes_limit=self._limit_bytes(),
        )

    def _check_fits(self, spec: AdapterSpec) -> None:
        if len(self._adapters) >= self.limits.max_adapters:
            raise ValueError(
                f"client: there are {len(self._adapters)} adapters, the most that this endpoint takes. "
                "To fix: wait until another client ends, or raise max_adapters"
            )
        if not 1 <= spec.rank <= self.limits.max_rank:
            raise ValueError(
                f"adapter: rank is {spec.rank}, and this endpoint takes 1 to {self.limits.max_rank}. "
                "To fix: take a smaller rank, or raise max_rank"
            )
        if (needed := self._bytes_with(spec)) > (limit := self._limit_bytes()):
            raise ValueError(
                f"adapter: with it, this process takes {needed / 1e9:.2f} GB of memory, of {limit / 1e9:.2f}. "
                "To fix: take a smaller rank, or wait until another client ends"
            )

    def _bytes_with(self, spec: AdapterSpec) -> int:
        return used_bytes(self._device) + adapter_bytes([spec], self._stem.model)

    def _limit_bytes(self) -> int:
        return self.limits.memory_bytes or available_bytes(self._device)

    def _time_rows(self, spec: AdapterSpec) -> None:
        """Computes one row, and two of two clients, without any effect."""
        adapters = [ClientAdapter(spec, self._stem.model) for _ in range(2)]
        tokens = torch.zeros((1, self._padded.of(self.limits.seq_len)), dtype=torch.int64, device=self._device)
        for adapter in adapters:
            self._stem.open(adapter.sites)
            lay_below([adapter.row])
        for num in (1, 1, 2, 1, 2):
            parts = [
                AdapterBatch(adapter_modules=each.modules(), inputs={"input_ids": tokens}, layout=each.row.layout)
                for each in adapters[:num]
            ]
            started_s = time.perf_counter()
            self._stem.learn(parts, [lambda output: (output.logits.logsumexp(-1).sum(), 1)] * num)
            seconds = time.perf_counter() - started_s
            self._times.note(num_tokens=num * tokens.shape[1], num_clients=num, seconds=seconds)
        self._stem.forget()

    def _known(self, client: str) -> ClientAdapter:
        if client not in self._adapters:
            raise ValueError(f"client: there is none named {client!r}. To fix: create it first")
        return self._adapters[client]

    def _join(self, client: str, adapter: ClientAdapter) -> None:
        self._stem.open(adapter.sites)
        self._adapters[client] = adapter
        self._lay_out()

    def _lay_out(self) -> None:
        """Moves the rows of adapters of one shape into one matrix, so that they are multiplied without a copy."""
        kept = {name: each.gradients.clone() for name, each in self._adapters.items() if each.has_gradients}
        alike = defaultdict(list)
        for each in self._adapters.values():
            alike[each.row.layout].append(each.row)
        self._stem.forget()
        for rows in alike.values():
            lay_below(rows)
        for name, gradients in kept.items():
            self._adapters[name].gradients.copy_(gradients)

    # -- losses and steps ----------------------------------------------------------------------------------------------

    def compute(self, requests: Sequence[LossRequest]) -> tuple[LossResult | RequestRefusal, ...]:
        """Computes losses, and adds their gradients to those of each client since its last step.

        Raises EndpointLostError where a computation fails, or what was computed cannot be recorded.
        """
        started_s = time.perf_counter()
        refused = {i: RequestRefusal(reason=why) for i, each in enumerate(requests) if (why := self._obstacle(each))}
        taken = [i for i in range(len(requests)) if i not in refused]
        learnt = [i for i in taken if requests[i].with_gradients]
        read = [i for i in taken if not requests[i].with_gradients]
        with _lost_by_failure():
            results = dict(zip(learnt, self._learn([requests[i] for i in learnt]), strict=True))
            results |= zip(read, self._read([requests[i] for i in read]), strict=True)
        self._computed_s += time.perf_counter() - started_s
        if learnt:
            self._note([requests[i] for i in learnt])
            self._store_if_due()
        self.busy_s += time.perf_counter() - started_s
        return tuple(refused[i] if i in refused else results[i] for i in range(len(requests)))

    def step(self, steps: Sequence[AdamStep]) -> tuple[Mapping[str, float] | RequestRefusal, ...]:
        """Takes optimizer steps, and returns once they are on disk, with the norm of each one's gradients.

        Raises EndpointLostError where a computation fails, or the disk has not kept them.
        """
        started_s = time.perf_counter()
        try:
            self._journal.append(steps=steps)
        except OSError as error:
            reason = storage_fault(error) or str(error)
            return tuple(RequestRefusal(reason=reason) for _ in steps)
        syncing = self._disk.submit(self._journal.sync)  # of the losses before as well, on which the steps depend
        with _lost_by_failure():
            answers = self._take(steps)
        waited_s = time.perf_counter()
        try:
            syncing.result()
        except OSError as error:
            raise EndpointLostError(storage_fault(error) or str(error)) from error
        self.storing_s += time.perf_counter() - waited_s
        self._computed_s += time.perf_counter() - started_s
        self._store_if_due()
        self.busy_s += time.perf_counter() - started_s
        return answers

    def forget_gradients(self, client: str | None = None) -> None:
        """Drops the gradients that no step has used, of one client or of all."""
        for name, adapter in self._adapters.items():
            adapter.has_gradients = adapter.has_gradients and client not in (None, name)
        with _lost_by_failure():
            self._store_all()

    def _take(self, steps: Sequence[AdamStep]) -> tuple[Mapping[str, float] | RequestRefusal, ...]:
        answers: list[Mapping[str, float] | RequestRefusal] = []
        for each in steps:
            try:
                answers.append({"grad_norm": self._known(each.client).take_step(each)})
            except ValueError as error:
                drops_gradients = isinstance(error, NonFiniteGradientsError)
                answers.append(RequestRefusal(reason=str(error), drops_gradients=drops_gradients))
        return tuple(answers)

    def _obstacle(self, request: LossRequest) -> str | None:
        if request.client not in self._adapters:
            return f"client: there is none named {request.client!r}. To fix: create it first"
        if not request.rows:
            return "there are no rows. To fix: send at least one"
        for i, row in enumerate(request.rows):
            if reason := self.tokens_obstacle(row.tokens):
                return f"row {i} {reason}"
        if reason := loss_obstacle(request):
            return reason
        for i, row in enumerate(request.rows):
            targets = row.loss_inputs[TARGETS]
            if int(targets.min()) < 0 or int(targets.max()) >= self._num_tokens:
                return f"row {i} has {TARGETS} that are not tokens of the base, which has {self._num_tokens}"
        return None

    def tokens_obstacle(self, tokens: Sequence[int]) -> str | None:
        """Returns why the base cannot read a sequence of tokens."""
        if not tokens:
            return "has no tokens"
        if len(tokens) > self.limits.seq_len:
            return f"has {len(tokens)} tokens, and this endpoint takes up to {self.limits.seq_len}"
        if min(tokens) < 0 or max(tokens) >= self._num_tokens:
            return f"has tokens that the base does not know: it has {self._num_tokens}"
        return None

    def _blocks(self, requests: Sequence[LossRequest]) -> list[list[RequestRowBlock]]:
        return [blocks_of(request, padded=self._padded, device=self._device) for request in requests]

    def _part(self, block: RequestRowBlock) -> AdapterBatch:
        adapter = self._adapters[block.request.client]
        return AdapterBatch(
            adapter_modules=adapter.modules(), inputs={"input_ids": block.tokens}, layout=adapter.row.layout
        )

    def _learn(self, requests: Sequence[LossRequest]) -> list[LossResult]:
        divided = self._blocks(requests)
        waiting: dict[str, deque[RequestRowBlock]] = defaultdict(deque)
        for blocks in divided:
            waiting[blocks[0].request.client].extend(blocks)
        sums: dict[int, float] = {}
        while waiting:
            wave = [queue.popleft() for queue in waiting.values()]
            waiting = {client: queue for client, queue in waiting.items() if queue}
            started_s = time.perf_counter()
            for blocks in self._computed_together(wave):
                sums |= self._learn_blocks(blocks)
            self._times.note(
                num_tokens=sum(block.tokens.numel() for block in wave),
                num_clients=len(wave),
                seconds=time.perf_counter() - started_s,
            )
        return [_result(blocks, sums) for blocks in divided]

    def _learn_blocks(self, blocks: Sequence[RequestRowBlock]) -> dict[int, float]:
        adapters = [self._adapters[block.request.client] for block in blocks]
        before = [each.gradients.clone() if each.has_gradients else None for each in adapters]
        learnt = self._stem.learn([self._part(block) for block in blocks], [block.loss for block in blocks])
        for adapter, gradients in zip(adapters, before, strict=True):
            if gradients is not None:
                adapter.gradients.add_(gradients)
            adapter.has_gradients = True
        return {id(block): float(each.loss_sum) for block, each in zip(blocks, learnt, strict=True)}

    @torch.no_grad()
    def _read(self, requests: Sequence[LossRequest]) -> list[LossResult]:
        divided = self._blocks(requests)
        sums: dict[int, float] = {}
        for blocks in self._computed_together([block for each in divided for block in each]):
            for i, output in self._stem.outputs([self._part(block) for block in blocks]):
                sums[id(blocks[i])] = float(blocks[i].loss(output)[0])
        return [_result(blocks, sums) for blocks in divided]

    def _computed_together(self, blocks: list[RequestRowBlock]) -> list[list[RequestRowBlock]]:
        return [blocks] if self.batches else [[block] for block in blocks]

    # -- samples -------------------------------------------------------------------------------------------------------

    def sample(self, requests: Sequence[SamplingRequest]) -> tuple[SampleResult | RequestRefusal, ...]:
        """Samples sequences of clients, of checkpoints and of the base.

        Raises EndpointLostError where a computation fails.
        """
        turns = SamplingTurns(self._sampler, modules_of=self._sampled_modules, is_together=self.batches)
        named = {str(i): request for i, request in enumerate(requests)}
        with self._sampling():
            results = turns.take(named, num_tokens=self.limits.seq_len, begun=())
        return tuple(each for each in results.values() if each is not None)

    def sample_in_turns(
        self, requests: Mapping[str, SamplingRequest], *, num_tokens: int, begun: Collection[str]
    ) -> dict[str, SampleResult | RequestRefusal | None]:
        """Samples a few further tokens for each request, as `SamplingTurns.take` does.

        Raises EndpointLostError where a computation fails.
        """
        with self._sampling():
            return self._turns.take(requests, num_tokens=num_tokens, begun=begun)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        started_s = time.perf_counter()
        with _lost_by_failure():
            yield
        self.busy_s += time.perf_counter() - started_s

    def _sampled_modules(self, request: SamplingRequest) -> AdapterModules:
        """The adapter that samples. Raises ValueError where the request cannot be answered."""
        if reason := self.tokens_obstacle(request.prompt):
            raise ValueError(f"the prompt {reason}")
        has_texts = any(isinstance(each, str) for each in request.stop or ())
        has_tokenizer = has_texts and self._sampler.tokenizer is not None
        if reason := sampling_obstacle(request, has_tokenizer=has_tokenizer, num_tokens=self._num_tokens):
            raise ValueError(reason)
        if request.checkpoint is not None:
            return self._checkpoints.modules(request.checkpoint)
        return NO_ADAPTER if request.client is None else self._known(request.client).modules()

    # -- what is kept --------------------------------------------------------------------------------------------------

    def save(self, client: str, name: str, *, with_optimizer: bool) -> Path:
        """Writes a checkpoint in peft's format and returns its folder; an existing one of that name is replaced.

        Raises ValueError where there is no such client, or the name cannot be a folder's.
        """
        from safetensors.torch import save_file

        adapter, folder = self._known(client), self._folders.checkpoint(client, name)

        def add_optimizer(aside: Path) -> None:
            if with_optimizer:
                save_file(
                    {key: value.cpu() for key, value in adapter.optimizer_state().items()}, aside / OPTIMIZER_FILE
                )

        export_adapter(
            folder,
            adapter=adapter.adapter,
            spec=self._base,
            base=self._base.from_pretrained,
            state=adapter.weights(),
            prepared=NOTHING,
            add_files=add_optimizer,
        )
        return folder

    def load(self, client: str, path: Path, *, with_optimizer: bool) -> None:
        """Replaces a client's weights, and its optimizer's state, by those of a checkpoint.

        Raises ValueError where the checkpoint does not fit, and OSError where the disk does not take the state, with
        nothing changed.
        """
        adapter = self._known(client)
        before = {name: value.clone() for name, value in adapter.state().items()}
        step, grad_norm = adapter.step, adapter.grad_norm
        adapter.load(path, self._stem.model, with_optimizer=with_optimizer)
        try:
            self._folders.write(client, adapter, number=self._journal.number)
        except OSError:
            adapter.restore(before, step=step, grad_norm=grad_norm)
            raise

    def _restore(self) -> None:
        since: dict[str, int] = {}
        for client, stored in self._folders.stored():
            self._join(client, ClientAdapter(stored.spec, self._stem.model))
            since[client] = stored.number
        for client, adapter in self._adapters.items():
            number = self._folders.restore(client, adapter)
            since[client] = since[client] if number is None else number
        for record in self._journal.records():
            clients = {client for client, number in since.items() if number <= record.number}
            self._learn([each for each in record.losses if each.client in clients])
            self._take([each for each in record.steps if each.client in clients])
        for number in since.values():
            self._journal.number = max(self._journal.number, number)
        self._store_all()

    def _note(self, losses: Sequence[LossRequest]) -> None:
        started_s = time.perf_counter()
        try:
            self._journal.append(losses=losses)
        except OSError as error:
            raise EndpointLostError(storage_fault(error) or str(error)) from error
        self.storing_s += time.perf_counter() - started_s

    def _store_if_due(self) -> None:
        """Stores whole states once so much was computed that they take a small share of the time."""
        if self._computed_s * STORING_SHARE > self._storing_s:
            try:
                self._store_all()
            except OSError as error:  # the journal has everything
                self._computed_s = 0.0
                logger.warning("whole states were not stored: %s", storage_fault(error) or error)

    def _store_all(self) -> None:
        started_s = time.perf_counter()
        for client, adapter in self._adapters.items():
            self._folders.write(client, adapter, number=self._journal.number)
        self._journal.clear()
        self._storing_s, self._computed_s = time.perf_counter() - started_s, 0.0
        self.storing_s += self._storing_s


@contextmanager
def _lost_by_failure() -> Iterator[None]:
    """Makes any error one of the endpoint as a whole, whose memory may hold a part of what was computed."""
    try:
        yield
    except Exception as error:
        raise EndpointLostError(message_of(error)) from error


def _result(blocks: Sequence[RequestRowBlock], sums: Mapping[int, float]) -> LossResult:
    outputs = dict(output for block in blocks for output in block.outputs())
    total = sum(sums[id(block)] for block in blocks)
    return LossResult(
        outputs=tuple({"logprobs": outputs[place]} for place in sorted(outputs)), metrics={"loss:sum": total}
    )
