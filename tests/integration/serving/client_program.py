"""A program of the client `tinker`: every call that an endpoint answers. Prints one JSON object."""

import json
import urllib.request

import tinker
import torch
from tinker import types


def datum(tokens, **inputs):
    plain = {"target_tokens": [*tokens[1:], 1], "weights": [1.0] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs or plain)


def refused(act):
    try:
        act()
    except tinker.TinkerError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def square(data, logprobs):
    loss = sum((each**2).sum() for each in logprobs)
    return loss, {"custom/square:sum": float(loss)}


def scores(sampler, prompt, params):
    """What is asked of tokens besides their own logprobs."""
    wanted = torch.tensor([[2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 4, 0, 0]])
    options = {"topk_sample_logprobs": 2, "prompt_alt_tokens_k": 3}
    sparse = types.TensorData.from_torch_sparse(wanted)
    answer = sampler.sample(prompt, 1, params, target_prompt_logprobs=sparse, **options).result()
    drawn, targets = answer.prompt_alt_tokens, answer.target_prompt_logprobs
    return {
        "topk": [len(place) for place in answer.sequences[0].topk_logprobs],
        "drawn": [list(drawn.tokens.shape), list(drawn.logprobs.shape)],
        "targets": [list(targets.shape), targets.sparse_col_indices, list(targets.data)],
        "plain": sampler.compute_logprobs(prompt).result(),
    }


def records(rest, client, saved):
    """What is seen and changed of checkpoints, runs and sessions."""
    run = client.get_info().model_id
    external = client.save_weights_external("external").result().path
    urls = rest.get_external_weights_urls(external).result().urls
    with urllib.request.urlopen(urls["adapter_config.json"]) as file:
        rank = json.load(file)["r"]
    rest.set_checkpoint_ttl_from_tinker_path(saved, 7200).result()
    expires = {
        each.tinker_path: each.expires_at is not None for each in rest.list_checkpoints(run).result().checkpoints
    }
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result()
    rest.publish_checkpoint_from_tinker_path(saved).result()
    public = [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints if each.public]
    rest.unpublish_checkpoint_from_tinker_path(saved).result()
    rest.delete_checkpoint_from_tinker_path(external).result()
    left = [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints]
    shown = rest.get_training_run_by_tinker_path(saved).result()
    session = rest.get_session(run.partition(":")[0]).result()
    return {
        "rank": rank,
        "expires": expires[saved],
        "public": public == [saved],
        "deleted": external not in left and saved in left,
        "run": [shown.training_run_id == run, shown.last_checkpoint.tinker_path == saved],
        "runs": run in [each.training_run_id for each in rest.list_training_runs().result().training_runs],
        "session": run in session.training_run_ids,
        "sessions": run.partition(":")[0] in rest.list_sessions().result().sessions,
        "copy": refused(lambda: rest.copy_weights(saved, "project").result()),
    }


def main():
    service = tinker.ServiceClient(user_metadata={"name": "program"})
    rest = tinker.RestClient()
    result = {"models": [each.model_name for each in rest.get_server_capabilities().result().supported_models]}
    client = service.create_lora_training_client("tiny", rank=4, seed=1, user_metadata={"name": "ann"}).result()
    result["info"] = [client.get_info().model_name, client.get_info().lora_rank, len(client.get_tokenizer())]
    rows = [datum([1, 2, 3, 4]), datum([5, 6, 7])]
    adam = types.AdamParams(learning_rate=1e-2)
    loss, step = client.forward_backward(rows, "cross_entropy"), client.optim_step(adam)
    result["losses"] = [loss.result().metrics["loss:sum"]]
    result["grad_norm"] = step.result().metrics["grad_norm"]
    result["losses"].append(client.forward(rows, "cross_entropy").result().metrics["loss:sum"])
    custom, step = client.forward_backward_custom(rows, square), client.optim_step(adam)
    metrics = custom.result().metrics
    result["custom"] = [metrics["loss:sum"], metrics["custom/square:sum"]]
    step.result()
    saved = client.save_state("state").result().path
    sampler_path = client.save_weights_for_sampler("sampler").result().path
    result["weights"] = [rest.get_weights_info_by_tinker_path(saved).result().lora_rank, saved]

    sampler = service.create_sampling_client(model_path=sampler_path).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    params = types.SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, top_k=40, seed=3)
    first, again = (sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result() for _ in range(2))
    result["samples"] = [[each.tokens for each in answer.sequences] for answer in (first, again)]
    logprobs = client.forward([datum([1, 2, 3, 4])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    result["logprobs"] = [logprobs[:3], first.prompt_logprobs[1:], sampler.compute_logprobs(prompt).result()[1:]]

    result["scores"] = scores(sampler, prompt, params)
    result["records"] = records(rest, client, saved)

    sequence = first.sequences[0]
    tokens = [1, 2, 3, 4, *sequence.tokens[:-1]]
    target = torch.tensor([0] * 3 + sequence.tokens)
    reward = {
        "target_tokens": target,
        "logprobs": torch.tensor([0.0] * 3 + sequence.logprobs),
        "advantages": torch.tensor([0.0] * 3 + [1.0] * len(sequence.tokens)),
    }
    result["reinforcement"] = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        result["reinforcement"][name] = (
            client.forward_backward([datum(tokens, **reward)], name).result().metrics["loss:sum"]
        )
    masked = {**reward, "sequence_ratio_mask": (target != 0).float()}
    thresholds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    gspo = client.forward_backward([datum(tokens, **masked)], "gspo", thresholds).result()
    result["reinforcement"]["gspo"] = gspo.metrics["loss:sum"]
    several = torch.zeros(4, 6, dtype=torch.int64)
    several[:, 0], several[0, 1] = torch.tensor([2, 3, 4, 1]), 9
    weighted = datum([1, 2, 3, 4], target_tokens=several, weights=(several > 0).float())
    distilled = client.forward([weighted], "cross_entropy").result()
    result["several"] = [list(distilled.loss_fn_outputs[0]["logprobs"].shape), distilled.metrics["loss:sum"]]
    client.optim_step(adam).result()
    result["refused"] = refused(lambda: client.forward_backward([datum(tokens, **reward)], "stable_reinforce").result())

    continued = service.create_training_client_from_state_with_optimizer(saved).result()
    fresh = service.create_training_client_from_state(saved).result()
    after = []
    for each in (continued, fresh):
        each.forward_backward(rows, "cross_entropy")
        each.optim_step(adam).result()
        after.append(each.forward(rows, "cross_entropy").result().metrics["loss:sum"])
    client.load_state_with_optimizer(saved).result()
    client.forward_backward(rows, "cross_entropy")
    client.optim_step(adam).result()
    after.append(client.forward(rows, "cross_entropy").result().metrics["loss:sum"])
    result["continued"] = after
    result["rank"] = refused(lambda: service.create_lora_training_client("tiny", rank=1000).result())
    service.close("success").result()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
