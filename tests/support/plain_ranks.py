"""What test_ddp_plain.py runs in two processes: Lightning without phases; each rank tells what it
was given.

python plain_ranks.py FOLDER BATCHES [CHECKPOINT]      (stops and saves after BATCHES batches)
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from perfect import LoaderCallback, ReuseLoader

SAMPLES, BATCH = 41, 4


class Points:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(2, generator=torch.Generator().manual_seed(index)), index


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 2)
        self.served: list[list[int]] = []
        self.lengths: list[int | float] = []

    def on_train_epoch_start(self) -> None:
        self.lengths.append(self.trainer.num_training_batches)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        points, ids = batch
        self.served.append(ids.tolist())
        return nn.functional.cross_entropy(self.net(points), ids % 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(L.Callback):
    """Saves after so many batches, and makes each rank want another reuse from then on."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.batches:
            loader = trainer.train_dataloader
            assert isinstance(loader, ReuseLoader)
            # As reuse="auto" may: each rank goes by what it measures.
            loader.set_reuse(2 + trainer.global_rank)
            trainer.save_checkpoint(self.path)


def main(folder: Path, batches: int, checkpoint: Path | None) -> None:
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=3,
        callbacks=[LoaderCallback(), Stop(batches, folder / "saved.ckpt")],
        default_root_dir=folder,
    )  # fmt: skip
    loader = ReuseLoader(Points(), BATCH, reuse=3, workers=1)
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
    told = {
        "served": module.served,
        "lengths": module.lengths,
        "weight": module.net.weight.detach().flatten().tolist(),
    }
    name = "resumed" if checkpoint else "whole"
    (folder / f"{name}{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
