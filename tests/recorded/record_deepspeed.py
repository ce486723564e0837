"""Records a ZeRO checkpoint: torchrun --nproc_per_node 2 record_deepspeed.py FOLDER STAGE fp32|bf16."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

if __name__ == "__main__":
    folder, stage, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.model.layers[1].input_layernorm.weight.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.dim() == 1], "weight_decay": 0.0},
    ]
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    if stage == 3:
        zero |= {"sub_group_size": 2000, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(0, 40, (1, 12), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder, tag=f"global_step{engine.global_steps}")
    dist.destroy_process_group()
