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

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import offload_lightning as ol

from offload import CaptureError, OffloadError
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


class Gathering(Module):
    """Pairs of all ranks, with gradients, as SimCLR and CLIP have them; and a barrier."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        own = torch.nn.functional.normalize(self(batch[0]))
        torch.distributed.barrier()
        everyones: Any = self.all_gather(own, sync_grads=True)
        pairs = own @ everyones.flatten(0, 1).T
        return loss + torch.nn.functional.cross_entropy(pairs, torch.arange(len(own)))


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
    "60 %": {"budget": "60%", "bucket_cap_mb": 0.005},
    "checked": {"budget": "60%"},
    "updates on the host": {"budget": "60%", "optimizer": "host"},
}
ONCE = ("no budget", "checked", "updates on the host")
"""With the first and the last but one of the runs; the others are of each."""


def train(strategy: Any, **options: Any) -> ol.Result:
    statistics = Statistics()
    result = ol.train(strategy, **{"make": Module, **options}, devices=2, callbacks=[statistics])
    result.metrics |= {f"statistics {n}": seen for n, seen in enumerate(statistics.seen)}
    return result


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


def compared(told: dict[str, Any], name: str, plain: ol.Result, result: ol.Result) -> None:
    tasks = [task.name for task in result.strategy.plan.graph.tasks]
    told[name] = {
        "differences": ol.differences(plain, result),
        "all_reduces": sum(name.startswith("all_reduce") for name in tasks),
        "weight": float(result.module.head.weight.double().sum()),
    }


def resumed(told: dict[str, Any], folder: Path) -> None:
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
    compared(told, "resumed", *results)
    told["resumed"]["differences"] += ol._unequal("keys", [*saved[0]], [*saved[1]])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        told["resumed"]["differences"] += ol._unequal(part, saved[0][part], saved[1][part])


def eager(told: dict[str, Any]) -> None:
    """What one rank cannot plan."""
    options: dict[str, Any] = {"make": Odd, "accumulate_grad_batches": 2}
    plain = train(DDPStrategy(), **options)
    result = train(OffloadDDPStrategy(), **options)
    told["eager"] = {"differences": ol.differences(plain, result), "planned": True}
    try:
        result.strategy.plan  # noqa: B018
    except OffloadError as error:
        told["eager"]["planned"] = str(error)
    unused = {"find_unused_parameters": True}
    plain = train(DDPStrategy(**unused), make=Two)
    result = train(OffloadDDPStrategy(**unused), make=Two)
    told["eager"]["differences"] += ol.differences(plain, result)
    try:
        train(OffloadDDPStrategy("60%"), make=Two)
    except CaptureError as error:
        told["eager"]["other heads"] = str(error)
    try:
        train(OffloadDDPStrategy("60%"), **options)
    except CaptureError as error:
        told["eager"]["refused"] = str(error)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {"runs": {}}
    rank = 0
    for name, options in RUNS.items():
        plain = train(DDPStrategy(), **options)
        rank = plain.trainer.global_rank
        for kind, asked in STRATEGIES.items():
            if kind not in ONCE or name in ("plain", "accumulated and clipped"):
                result = train(OffloadDDPStrategy(**asked), **options)
                compared(told["runs"], f"{name}, {kind}", plain, result)
    resumed(told["runs"], folder)
    plain = train(DDPStrategy(), make=Gathering)
    for name, options in {"gathered": {}, "gathered, 60 %": {"budget": "60%"}}.items():
        result = train(OffloadDDPStrategy(**options), make=Gathering)
        compared(told["runs"], name, plain, result)
    eager(told)
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
