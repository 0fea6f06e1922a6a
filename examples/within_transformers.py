"""A budget around the Trainer of transformers, by a callback: within_transformers.py FOLDER."""

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


data = [{"input_ids": row, "labels": row} for row in torch.arange(16).repeat(32, 1)]
config = GPT2Config(vocab_size=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
how = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
)
trainer = Trainer(
    GPT2LMHeadModel(config), how, train_dataset=data, eval_dataset=data, callbacks=[WithinBudget()]
)
trainer.train()
print(trainer.evaluate())
