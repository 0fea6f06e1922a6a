"""A peer of a swarm. It trains a small net on made-up numbers, and writes down what it does.

    FOLDER/step          the steps that it has applied
    FOLDER/serves.jsonl  step, lane and sample ids of every lane that it has computed
    FOLDER/digests.txt   after every step: the step, and the digest of all weights
    FOLDER/result.json   at its end: its last step, losses, rates, errors, what it has logged

The first three are there after a kill, too. What a caller wants at a certain moment is in `faults`
(faults.py).
"""

import datetime
import hashlib
import json
import logging
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import TensorDataset

from benchmarks.swarms.faults import Fault, Faults
from loaders import ReuseLoader
from perfect import LoaderCallback
from trainers.elastic.deciding.decision import LaneRate
from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.elastic.peer.replay_strategy import ReplayStrategy
from trainers.elastic.peer.swarm_commits import SwarmCommits
from trainers.elastic.wire import stream
from trainers.elastic.work.plain_work import PlainWork


class Net(L.LightningModule):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        width = settings.get("width", 16)
        self.odd = settings.get("odd", "")
        """What a swarm refuses: manual, sync_dist or state."""
        self.automatic_optimization = self.odd != "manual"
        middle: list[torch.nn.Module] = []
        if settings.get("norm", True):
            middle = [torch.nn.BatchNorm1d(width)]
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), *middle, torch.nn.ReLU(),
            torch.nn.Dropout(settings.get("dropout", 0.2)), torch.nn.Linear(width, 4),
        )  # fmt: skip
        self.slow = settings.get("slow", 0.0)
        self.no_number = False

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        if self.slow:
            time.sleep(self.slow)
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        if self.no_number:
            self.no_number = False
            loss = loss * float("nan")
        self.log("train_loss", loss, sync_dist=self.odd == "sync_dist")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Watch(L.Callback):
    """Writes down what the caller compares."""

    def __init__(self, settings: dict[str, Any], faults: Faults) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.validated: list[tuple[int, float]] = []
        self.passes: list[int] = []
        """The step after which each of Lightning's epochs has ended."""
        self.seconds: list[float] = []
        """When each step had ended, on this machine's monotonic clock."""
        self.cpu: list[float] = []
        """The CPU seconds that this process had taken then."""
        self.odd = settings.get("odd", "")
        self.faults = faults
        self.out = Path(settings["out"])
        self.reuses = {int(step): reuse for step, reuse in settings.get("reuses", {}).items()}
        self.digests = None
        if settings.get("serves", True):
            self.digests = self.out.joinpath("digests.txt").open("a", buffering=1)

    def state_dict(self) -> dict[str, Any]:
        return {"odd": self} if self.odd == "state" else {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        self.seconds.append(time.monotonic())
        self.cpu.append(time.process_time())
        if self.digests is not None:
            self.digests.write(f"{trainer.global_step} {digest(pl_module)}\n")
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.out.joinpath("step").write_text(str(trainer.global_step))
        self.faults.reached("batch_end", trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.passes.append(trainer.global_step)
        if trainer.current_epoch in self.reuses:
            loader: Any = trainer.train_dataloader
            loader.set_reuse(self.reuses[trainer.current_epoch])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = float(trainer.callback_metrics["val_loss"])
        self.validated.append((trainer.global_step, found))


def digest(module: torch.nn.Module) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in module.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def data(samples: int, seed: int = 1) -> TensorDataset:
    dice = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=dice)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def write_serves(out: Path) -> None:
    """Let every lane that is computed be written down."""
    serves = out.joinpath("serves.jsonl").open("a", buffering=1)
    compute = PlainWork.compute

    def noted(self: PlainWork, lanes: Sequence[int]) -> int:
        count = compute(self, lanes)
        step, place = self._step.number, self._lanes.position  # pyright: ignore[reportPrivateUsage]
        for lane in lanes[:count]:
            ids = self._lanes.ids(lane).ids.tolist()  # pyright: ignore[reportPrivateUsage]
            serves.write(json.dumps([step, lane, place[0], ids]) + "\n")
        return count

    PlainWork.compute = noted


def told_by_nobody(self: LaneRate, lanes: int, seconds: float) -> None:
    """In place of `LaneRate.add_step`: all members get equally many lanes, so each gets some of
    every step, whatever else this machine does."""


def time_calls(names: list[str]) -> dict[str, list[float]]:
    """Let calls of `SwarmCommits` be timed: the seconds of each of them, by name."""
    timed: dict[str, list[float]] = {name: [] for name in names}

    def around(name: str) -> None:
        call = getattr(SwarmCommits, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = call(*args, **kwargs)
            timed[name].append(time.monotonic() - began)
            return result

        setattr(SwarmCommits, name, wrapped)

    for name in names:
        around(name)
    return timed


def set_clock(ahead: float) -> None:
    """Let this process take it to be so many seconds later than it is."""
    wall = time.time

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Later":
            return cls.fromtimestamp(wall() + ahead, tz)

    time.time = lambda: wall() + ahead
    stream.datetime = Later  # pyright: ignore[reportAttributeAccessIssue]


def strategy_of(settings: dict[str, Any]) -> Any:
    if settings.get("plain"):
        return "auto"
    if logs := settings.get("replay"):
        return ReplayStrategy([Path(log) for log in logs])
    return ElasticStrategy(
        lanes=settings.get("lanes", 8),
        join=settings["join"],
        secret_file=settings["secret"],
        name=settings.get("called", settings["name"]),
        sum=settings.get("sum", "fast"),
        **settings.get("strategy", {}),
    )


def main(settings: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    out = Path(settings["out"])
    faults = Faults([Fault(**told) for told in settings.get("faults", [])], out)
    faults.install()
    if "clock" in settings:
        set_clock(settings["clock"])
    if settings.get("serves", True):
        write_serves(out)
    if settings.get("even"):
        LaneRate.add_step = told_by_nobody
    timed = time_calls(settings.get("timed", []))
    torch.manual_seed(settings.get("seed", 7))
    module = Net(settings)
    faults.module = module
    loader = ReuseLoader(
        data(settings.get("samples", 200), settings.get("data", 1)),
        batch_size=settings.get("batch", 32), reuse=settings.get("reuse", 2), buffer_batches=2,
        seed=settings.get("loader_seed", 3), workers=1,
    )  # fmt: skip
    watch = Watch(settings, faults)
    callbacks: list[L.Callback] = [watch]
    if settings.get("loader_callback"):
        callbacks.append(LoaderCallback())
    if every := settings.get("checkpoints"):
        kept = ModelCheckpoint(out / "checkpoints", every_n_train_steps=every, save_top_k=-1)
        callbacks.append(kept)
    error, began, gaps = "", time.monotonic(), []
    trainer: L.Trainer | None = None
    try:
        strategy = strategy_of(settings)
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", max_steps=settings["steps"], max_epochs=-1,
            gradient_clip_val=settings.get("clip", 1.0), callbacks=callbacks,
            logger=CSVLogger(out) if settings.get("logged") else False,
            enable_checkpointing=bool(every), enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=out,
            **settings.get("trainer", {}),
        )  # fmt: skip
        val = torch.utils.data.DataLoader(data(64), batch_size=64) if settings.get("val") else None
        faults.strategy = strategy
        gaps = getattr(strategy, "gaps", [])
        trainer.fit(module, loader, val)
        gaps = getattr(strategy, "gaps", [])
    except Exception as problem:
        logging.exception("the peer has ended with an error")
        error = f"{type(problem).__name__}: {problem}"
    finally:
        told = {
            "step": 0 if trainer is None else trainer.global_step, "digest": digest(module),
            "losses": watch.losses, "rates": watch.rates, "validated": watch.validated,
            "error": error, "began": began, "seconds": watch.seconds, "gaps": gaps,
            "timed": timed, "cpu": watch.cpu, "passes": watch.passes,
            "threads": [t.name for t in threading.enumerate()],
        }  # fmt: skip
        if trainer is not None and isinstance(trainer.strategy, ReplayStrategy):
            told["compared"] = trainer.strategy.replayed.compared
        out.joinpath("result.json").write_text(json.dumps(told))
