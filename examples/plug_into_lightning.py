"""Plugs reuse into an existing LightningModule and DataLoader, in the lines marked `# perfect`.

python examples/plug_into_lightning.py      (seconds, no data needed)

For training in two phases, reused samples first and fresh ones last, give the Trainer a
`perfect.PhaseSwitch` beside the `LoaderCallback` (see the README).
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from perfect import LoaderCallback, ReuseLoader  # perfect


class SlowPoints(Dataset[tuple[torch.Tensor, int]]):
    """This stands for a data set whose samples are expensive to decode."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return point, int(point.norm() > 1.18)


class Classifier(L.LightningModule):
    """An ordinary module, which knows nothing of reuse."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    dataloader = DataLoader(SlowPoints(), batch_size=50, shuffle=True, num_workers=2)
    loader = ReuseLoader.from_dataloader(dataloader, reuse=3)  # perfect
    trainer = L.Trainer(
        # perfect: its state in checkpoints, its counters in logs; all passes, each R times as long
        callbacks=[LoaderCallback(same_steps=False)],
        accelerator="cpu", max_epochs=8, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader)
    stats = loader.stats
    print(
        f"loss {float(trainer.callback_metrics['train_loss']):.3f} after"
        f" {trainer.global_step} steps: {stats.decoded} decodes for {stats.served} samples served"
    )


if __name__ == "__main__":
    main()
