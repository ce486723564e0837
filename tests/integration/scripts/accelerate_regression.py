"""Accelerate as in its own guide: dropout, accumulated gradients, a schedule, shuffled data over several epochs."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from beside import build, points
from torch.nn.functional import mse_loss

max_steps = int(sys.argv[1])
set_seed(5)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader(points(52), batch_size=4, shuffle=True)
model = build(dropout=0.3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max_steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
num_steps = 0
for _ in range(100):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        num_steps += accelerator.sync_gradients
        if num_steps == max_steps:
            break
    if num_steps == max_steps:
        break
print("trained", num_steps)
