"""What test_ddp.py runs in two processes: a plateau run; each rank tells what it saw.

python two_ranks.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from perfect import Phase, PhaseSwitch, PlateauRule, ReuseLoader, Schedule
from perfect.callbacks.phase_records import SAMPLE_LOSSES

SAMPLES = 41


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return point, int(point.sum() > 0), index


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 2)
        self.served: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y, ids = batch
        self.served.append(ids.tolist())
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": losses.mean(), SAMPLE_LOSSES: losses.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # The ranks log different accuracies: each would decide differently for itself.
        rank = self.trainer.global_rank
        accuracy = 0.5 if rank == 0 else 0.01 * self.trainer.global_step
        self.log("val_accuracy", accuracy, sync_dist=False, rank_zero_only=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: Path) -> None:
    constant, to_zero = Schedule("constant", 0.1), Schedule("linear", 0.1)
    phases = [
        Phase("pretrain", reuse=3, passes=8, lr=constant),
        Phase("finetune", passes=2, lr=to_zero),
    ]
    rule = PlateauRule(3, loss_slope=9.0, hits=2, cooldown=0, not_before=4)
    switch = PhaseSwitch(phases, plateau=rule, validate_every=1.0)
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", callbacks=[switch], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        num_sanity_val_steps=0, max_epochs=-1, check_val_every_n_epoch=None,
        use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    loader = ReuseLoader(Points(), batch_size=4, workers=1)
    trainer.fit(module, loader, DataLoader(Points(), batch_size=SAMPLES))
    told = {
        "switches": [[s.step, s.reason] for s in switch.policy.switches],
        "served": module.served,
        "steps": trainer.global_step,
        "weight": module.net.weight.detach().flatten().tolist(),
        "in_a_pass": len(loader),
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
