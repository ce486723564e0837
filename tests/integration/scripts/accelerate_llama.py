"""Accelerate with a transformers model and an evaluation after each epoch."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from beside import llama, sentences

num_epochs = int(sys.argv[1]) // 5
set_seed(7)
accelerator = Accelerator(cpu=True)
rows = sentences(24)
train = torch.utils.data.DataLoader(rows[:20], batch_size=4, shuffle=True)
held_out = torch.utils.data.DataLoader(rows[20:], batch_size=4)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
for epoch in range(num_epochs):
    model.train()
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss = sum(model(**batch).loss.item() for batch in held_out)
    accelerator.log({"eval_loss": loss}, step=epoch)
accelerator.end_training()
