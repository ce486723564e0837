"""An endpoint without a model: each client is one number, which losses read and steps change."""

import json
import time
from pathlib import Path

import torch

from ringmaster.features.endpoint.compute.requests import (
    AdapterSpec,
    ClientState,
    EndpointLostError,
    LossResult,
    Price,
    RequestRefusal,
    SampledSequence,
    SampleResult,
)

LOSSES = ("cross_entropy", "importance_sampling", "ppo")


class FakeEndpoint:
    """Writes each call into `calls.jsonl` of its folder. A row of first token 666 kills the process; 555 is refused.

    A request whose first token is 777 is computed once there is `CLIENT.go` in the folder.
    """

    def __init__(self, *, base, limits, folder, device, precision="fp32"):
        if base == "broken":
            raise ValueError("the base is broken")
        self.limits, self._folder = limits, Path(folder)
        (self._folder / "calls.jsonl").touch()
        self._states = {}
        self._gradients = {}
        self._turns = {}
        for file in sorted(self._folder.glob("*.state")):
            state = json.loads(file.read_text())
            self._states[state["client"]] = state
            self._gradients[state["client"]] = 0.0

    def _note(self, call, clients):
        with (self._folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps([call, clients]) + "\n")

    def _file_of(self, client, ending):
        return self._folder / f"{client.replace(':', '-')}.{ending}"

    def _write(self, client):
        self._file_of(client, "state").write_text(json.dumps(self._states[client]))

    def close(self):
        pass

    def forget_gradients(self, client):
        self._gradients |= dict.fromkeys(self._states if client is None else [client], 0.0)

    def add(self, client, spec):
        state = {"client": client, "rank": spec.rank, "seed": spec.seed, "step": 0, "value": 1.0}
        self._states[client] = state
        self._gradients[client] = 0.0
        self._write(client)

    def remove(self, client):
        del self._states[client]
        self._file_of(client, "state").unlink()

    def clients(self):
        return {
            name: ClientState(
                spec=AdapterSpec(rank=state["rank"], seed=state["seed"]),
                step=state["step"],
                grad_norm=state.get("grad_norm"),
            )
            for name, state in self._states.items()
        }

    def compute(self, requests):
        self._note("compute", [each.client for each in requests])
        if any(row.tokens[0] == 444 for each in requests for row in each.rows):
            raise EndpointLostError("out of memory")
        for each in requests:
            while each.rows[0].tokens[0] == 777 and not self._file_of(each.client, "go").exists():
                time.sleep(0.01)
        return tuple(map(self._loss, requests))

    def _loss(self, request):
        if request.loss not in LOSSES:
            return RequestRefusal(reason=f"{request.loss!r} is not a loss that is served")
        if any(len(row.tokens) > self.limits.seq_len for row in request.rows):
            return RequestRefusal(reason="a row is too long")
        if any(row.tokens[0] == 555 for row in request.rows):
            return RequestRefusal(reason="a row is refused")
        outputs, total = [], 0.0
        for row in request.rows:
            if row.tokens[0] == 666:
                raise SystemExit(9)
            logprobs = -torch.tensor(row.tokens, dtype=torch.float32) / 1000 * self._states[request.client]["value"]
            outputs.append({"logprobs": logprobs})
            weights = row.loss_inputs.get("weights", torch.ones(len(row.tokens)))
            total += float(-(logprobs * weights).sum())
        if request.with_gradients:
            self._gradients[request.client] += total
        return LossResult(outputs=tuple(outputs), metrics={"loss:sum": total})

    def step(self, steps):
        self._note("step", [each.client for each in steps])
        return tuple(map(self._stepped, steps))

    def _stepped(self, each):
        if each.weight_decay == 0.555:
            self._gradients[each.client] = 0.0
            return RequestRefusal(reason="the gradients are not finite", drops_gradients=True)
        state = self._states[each.client]
        state["value"] -= each.learning_rate * self._gradients[each.client]
        state |= {"step": state["step"] + 1, "grad_norm": 1.0}
        self._gradients[each.client] = 0.0
        self._write(each.client)
        if each.weight_decay == 0.666 and state["step"] == 2:  # dies after the state is on disk
            raise SystemExit(9)
        return {"grad_norm": 1.0}

    def save(self, client, name, *, with_optimizer):
        folder = self._folder / "checkpoints" / client.replace(":", "-") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps(self._states[client] | {"with_optimizer": with_optimizer}))
        return folder

    def load(self, client, path, *, with_optimizer):
        saved = json.loads((Path(path) / "state.json").read_text())
        if with_optimizer and not saved["with_optimizer"]:
            raise ValueError("the checkpoint has no state of the optimizer")
        step = saved["step"] if with_optimizer else 0
        self._states[client] |= {"value": saved["value"], "step": step}
        self._gradients[client] = 0.0
        self._write(client)

    def sample_in_turns(self, requests, *, num_tokens, begun):
        """A sample of first token 888 has a turn more than its tokens need."""
        self._note("sample", [str(each.checkpoint) for each in requests.values()])
        self._turns = {name: self._turns.get(name, 0) + 1 for name in {*requests, *begun}}
        return {name: self._turn(name, each, num_tokens) for name, each in requests.items()}

    def _turn(self, name, request, num_tokens):
        if request.prompt[0] == 888 and self._turns[name] * num_tokens <= request.max_tokens:
            return None
        return self._sampled(request)

    def _sampled(self, request):
        length = request.max_tokens
        tokens = tuple((request.prompt[-1] + i + 1) % 1000 for i in range(length))
        topk = (((3, -0.3),) * request.topk_sample_logprobs,) * length
        sequence = SampledSequence(
            tokens=tokens,
            logprobs=(-0.5,) * length,
            stop_reason="length",
            topk_logprobs=topk if request.topk_sample_logprobs else None,
        )
        n = len(request.prompt)
        return SampleResult(
            sequences=(sequence,) * request.num_samples,
            prompt_logprobs=(None, *(-1.0,) * (n - 1)) if request.with_prompt_logprobs else None,
            topk_prompt_logprobs=(None, *(((1, -0.1), (2, -0.2)),) * (n - 1)) if request.topk_prompt_logprobs else None,
            target_prompt_logprobs=request.target_prompt_tokens
            and tuple(tuple(-0.25 * max(token, 0) for token in place) for place in request.target_prompt_tokens),
            prompt_alt_tokens=(((4, -0.4),) * request.prompt_alt_tokens,) * (n - 1)
            if request.prompt_alt_tokens
            else None,
        )

    def price(self, spec):
        return Price(step_s_now=0.1, step_s_after=0.2, memory_bytes_after=spec.rank, memory_bytes_limit=1000)
