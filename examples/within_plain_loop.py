"""A budget around a plain PyTorch loop: autocast, micro-batches, clipping, a schedule, evaluation.

python examples/within_plain_loop.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import offload

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(32, 64), nn.TransformerEncoder(layer, 4), nn.Linear(64, 32))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
text = torch.arange(17).repeat(8, 1).to(device)


def loss_of(text: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


with offload.within("70%", model, optimizer) as within:  # or bytes, such as "8GiB"
    for step in range(20):
        for micro_batch in text.chunk(2):
            (loss_of(micro_batch) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 5 == 4:
            with torch.no_grad():
                print(f"step {step + 1}: loss {loss_of(text).item():.3f}")
    print(f"{within.planned_steps} steps ran by a plan: {within.plan}")
