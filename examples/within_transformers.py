"""A budget around the Trainer of transformers, by a callback.

python examples/within_transformers.py FOLDER
"""

import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import offload


class WithinBudget(TrainerCallback):
    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **more: Any) -> None:
        self.within = offload.within("80%", model, optimizer).__enter__()  # or "8GiB"

    def on_train_end(self, *_: Any, **more: Any) -> None:
        print(f"{self.within.planned_steps} steps ran by a plan: {self.within.plan}")
        self.within.__exit__(None, None, None)


text = torch.arange(16).repeat(32, 1)
data = [{"input_ids": row, "labels": row} for row in text]
sizes: dict[str, Any] = {
    "vocab_size": 32,
    "n_positions": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
how = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
)
trainer = Trainer(model, how, train_dataset=data, eval_dataset=data[:8], callbacks=[WithinBudget()])
trainer.train()
print({k: v for k, v in trainer.evaluate().items() if k == "eval_loss"})
