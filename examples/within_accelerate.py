"""A budget around a loop of accelerate.

python examples/within_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offload

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
inputs = torch.randn(64, 16)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with offload.within("80%", model, optimizer) as within:  # or bytes, such as "8GiB"
    for epoch in range(4):
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean().item():.3f}")
    print(f"{within.planned_steps} steps ran by a plan: {within.plan}")
