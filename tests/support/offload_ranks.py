"""What test_offload_ddp.py runs in two processes: plain DDP against live steps of each rank.

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
from support import offload_lightning as ol

from offload import CaptureError, StepError
from offload.graph.taskgraph import RANKS
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


class Odd(Module):
    """On rank 1 it depends on values."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0 if self.global_rank == 1 and loss > 0 else loss


class Two(Module):
    """Each rank uses a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Linear(ol.WIDTH, ol.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.head if self.global_rank == 0 else self.other
        return head(self.blocks(self.enter(x)))


class Unused(Module):
    """Nobody uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


SEARCHED = {"find_unused_parameters": True}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 1}
# 44 samples on 2 ranks are 22 each: batches of 8, 8 and 6.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "updates on the host": ({}, {}, {"optimizer": "host"}),
    "accumulated and clipped": (CLIPPED, {}, {}),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {}, {}),
    "reads a value": ({"make": Odd, "accumulate_grad_batches": 2}, {}, {}),
    "unused": ({"make": Unused}, SEARCHED, {}),
    "other heads": ({"make": Two}, SEARCHED, SEARCHED),
}
"""Options of the trainer, of plain DDP, and of ours."""
BUDGETS: dict[str, dict[str, Any]] = {
    "no budget": {},
    "60 %": {"budget": "60%", "bucket_cap_mb": 0.005},
}


def train(strategy: Any, **options: Any) -> ol.Result:
    statistics = Statistics()
    result = ol.train(strategy, **{"make": Module, **options}, devices=2, callbacks=[statistics])
    result.metrics |= {f"statistics {n}": seen for n, seen in enumerate(statistics.seen)}
    return result


def resumed(folder: Path) -> list[str]:
    """Two epochs, a checkpoint, one more: each strategy from its own."""
    saved, results = [], []
    for kind, strategy in (
        ("plain", DDPStrategy),
        ("ours", functools.partial(OffloadDDPStrategy, "60%")),
    ):
        result = train(strategy(), gradient_clip_val=0.1)
        path = folder / f"{kind}.ckpt"
        result.trainer.save_checkpoint(path)
        saved.append(torch.load(path, weights_only=False))
        result = train(strategy(), gradient_clip_val=0.1, max_epochs=3, ckpt_path=path)
        results.append(result)
    found = ol.differences(*results) + ol._unequal("keys", [*saved[0]], [*saved[1]])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        found += ol._unequal(part, saved[0][part], saved[1][part])
    return found


def refused(make: Any = Module, **given: Any) -> str:
    try:
        train(OffloadDDPStrategy(**given), make=make)
    except (CaptureError, StepError) as error:
        return str(error)
    return "it trains"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {"tasks of ranks": {}}
    rank = 0
    for name, (options, plain_given, given) in RUNS.items():
        plain = train(DDPStrategy(**plain_given), **options)
        rank = plain.trainer.global_rank
        for budget, more in BUDGETS.items():
            found = train(OffloadDDPStrategy(**more, **given), **options)
            told[f"{name}, {budget}"] = ol.differences(plain, found)
            tasks = sum(task.lane == RANKS for task in found.strategy.plan.graph.tasks)
            told["tasks of ranks"][f"{name}, {budget}"] = tasks
    told["resumed"] = resumed(folder)
    for budget, more in BUDGETS.items():
        told[f"without search, {budget}"] = refused(Two, **more)
        told[f"unknown, {budget}"] = refused(init_sync=True, **more)
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
