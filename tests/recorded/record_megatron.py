"""Records or loads a torch_dist checkpoint of Megatron-Core on CPUs, and writes its logits next to it.

torchrun --nproc_per_node TP*PP record_megatron.py save|load FOLDER TP PP [nemo]

With "nemo", it is saved as `nemo.lightning` 2.4 does: `MegatronParallel.sharded_state_dict` names the tensors of a
`LightningModule` with the prefix "module.", `MegatronStrategy.save_checkpoint` puts them and the optimizers into
Lightning's dictionary, and `MegatronCheckpointIO` saves it to FOLDER/weights, next to FOLDER/context.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import megatron.core.tensor_parallel as tensor_parallel
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2}
PLAIN = {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "add_bias_linear": False, "gated_linear_unit": True}
OFF = dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"), False)
OFF |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}


def without_gpus():
    """Makes the calls that wait for GPUs do nothing."""
    real = torch.tensor

    def tensor(*args, device=None, **options):
        return real(*args, device="cpu" if str(device).startswith("cuda") else device, **options)

    torch.tensor, torch.cuda.current_device, torch.cuda.synchronize = tensor, lambda: "cpu", lambda *_: None
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()


def init_state(optimizer, _=None):
    for each in [each for group in optimizer.param_groups for each in group["params"]]:
        if not optimizer.state[each]:
            optimizer.state[each] = {"step": torch.tensor(0.0)}
            optimizer.state[each] |= {key: torch.zeros_like(each) for key in ("exp_avg", "exp_avg_sq")}


if __name__ == "__main__":
    mode, folder, tp, pp = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    is_nemo = sys.argv[5:] == ["nemo"]
    place = folder / ("weights" if is_nemo else "iter_0000003")
    without_gpus()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp)
    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "pipeline_dtype": torch.float32}
    config = TransformerConfig(**SIZES, **PLAIN, **OFF, **parallel, activation_func=torch.nn.functional.silu)
    torch.manual_seed(5)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=40,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    base = {"is_expert_parallel": False, "is_decoupled_lr": False, "lr_mult": 1.0}
    groups = [
        {"params": [each for each in model.parameters() if each.dim() > 1], "wd_mult": 1.0, **base},
        {"params": [each for each in model.parameters() if each.dim() == 1], "wd_mult": 0.0, **base},
    ]
    inner = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = FP32Optimizer(inner, OptimizerConfig(optimizer="adam", lr=1e-2), init_state)

    def state(is_loading):
        named = model.sharded_state_dict(prefix="module." if is_nemo else "")
        states = optimizer.sharded_state_dict(named, is_loading=is_loading)
        return (
            {"sharded_state_dict": named, "optimizer": [states]} if is_nemo else {"model": named, "optimizer": states}
        )

    if mode == "save":
        for step in range(3):
            for each in model.parameters():
                each.grad = torch.full_like(each, 0.01 * (step + 1)) * (1 + each.detach().abs())
            inner.step()
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
            if is_nemo:
                (folder / "context").mkdir()
                (folder / "context" / "model.yaml").write_text(
                    "_target_: nemo.collections.llm.gpt.model.llama.LlamaModel\n"
                )
            else:
                (folder / "latest_checkpointed_iteration.txt").write_text("3")
        dist.barrier()
        stored = {**state(False), "iteration": 3, "checkpoint_version": 3.0}
        if is_nemo:
            stored |= {
                "epoch": 0,
                "global_step": 3,
                "state_dict": {},
                "loops": {},
                "callbacks": {},
                "lr_schedulers": [],
            }
        dist_checkpointing.save(stored, str(place))
    else:
        loaded = dist_checkpointing.load(state(True), str(place))
        named = loaded["sharded_state_dict"] if is_nemo else loaded["model"]
        model.load_state_dict({name.removeprefix("module."): each for name, each in named.items()})
        optimizer.load_state_dict(loaded["optimizer"][0] if is_nemo else loaded["optimizer"])
    if tp == pp == 1:
        tokens = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(3))
        mask = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)[None, None]
        with torch.no_grad():
            logits = model(tokens, torch.arange(12)[None].expand(2, 12), mask)
        torch.save({"tokens": tokens, "logits": logits}, f"{folder}.{mode}.pt")
    dist.barrier()
