"""What test_offload_ddp.py runs in two processes: plain DDP against one plan a rank.

python offload_ranks.py FOLDER      every rank writes what differs, by run, to FOLDER/rankN.json
"""

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parent))
import offload_lightning as ol

from trainers import OffloadDDPStrategy


class Module(ol.Module):
    """Metrics of all ranks together, besides each rank's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("all_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_all", loss, sync_dist=True)


class Statistics(L.Callback):
    """What BatchNorm has counted, from batch to batch: at the end it is rank 0's anyway."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: Any
    ) -> None:
        self.seen.append(pl_module.blocks[0].norm.running_mean.clone())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(pl_module.blocks[0].norm.running_mean.clone())


# 44 samples on 2 ranks are 22 each: batches of 8, 8 and 6.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"make": functools.partial(Module, "sgd", "epoch")},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2, "val_check_interval": 1},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "no budget": {"check_first_steps": 0},
    "60 %": {"budget": "60%", "check_first_steps": 0, "bucket_cap_mb": 0.01},
    "checked": {"budget": "60%"},
    "updates on the host": {"budget": "60%", "optimizer": "host", "check_first_steps": 0},
}
ONCE = ("no budget", "checked", "updates on the host")
"""With the first and the last but one of the runs; the others are of each."""


def train(strategy: Any, **options: Any) -> ol.Result:
    statistics = Statistics()
    result = ol.train(strategy, **{"make": Module, **options}, devices=2, callbacks=[statistics])
    result.metrics |= {f"statistics {n}": seen for n, seen in enumerate(statistics.seen)}
    return result


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {}
    rank = 0
    for name, options in RUNS.items():
        plain = train(DDPStrategy(), **options)
        rank = plain.trainer.global_rank
        for kind, asked in STRATEGIES.items():
            if kind in ONCE and name not in ("plain", "accumulated and clipped"):
                continue
            result = train(OffloadDDPStrategy(**asked), **options)
            tasks = [task.name for task in result.strategy.plan.graph.tasks]
            told[f"{name}, {kind}"] = {
                "differences": ol.differences(plain, result),
                "all_reduces": sum(name.startswith("all_reduce") for name in tasks),
                "weight": float(result.module.head.weight.double().sum()),
            }
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
