"""Small jobs of a fleet, what each becomes alone, and any schedule of them.

alone(job) ---- weights, draws, logs ---- every difference is named ---- a fleet's
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainers import OffloadStrategy
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Departed, Event, Failed, Finished, Leave, Start, Turn
from trainers.fleet.hosting.device_process import DeviceHost, HostedJob
from trainers.fleet.jobs.lightning_job import LightningJob
from trainers.fleet.jobs.tenancy import SeatSettings
from trainers.random_state import RandomState

CPU = torch.device("cpu")
QUIET = (
    "ignore:.*does not have many workers",
    "ignore:.*smaller than the logging interval",
    "ignore:.*deprecated:DeprecationWarning",
    "ignore:.*litlogger",
)
SAMPLES, BATCH = 40, 8
BUDGET = "70%"


class Net(L.LightningModule):
    """Dropout, statistics, a scheduler, validation, and draws of every generator."""

    def __init__(self, width: int = 16, optimizer: str = "adam", fails_at: int = -1) -> None:
        super().__init__()
        self.kind, self.fails_at = optimizer, fails_at
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(width, 2),
        )  # fmt: skip
        self.draws: list[float] = []
        self.logs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.fails_at:
            raise ValueError("this job was made to fail")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.draws.append(random.random() + float(np.random.rand()) + float(torch.rand(())))

    def on_train_epoch_end(self) -> None:
        self.logs.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def samples(count: int = SAMPLES) -> TensorDataset:
    numbers = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=numbers)
    return TensorDataset(x, (x.sum(1) > 0).long())


@dataclass(frozen=True, slots=True)
class JobKind:
    """What a job is made of. Everything follows from it, so it can be made again and again."""

    seed: int
    optimizer: str = "adam"
    width: int = 16
    offload: bool = True
    clip: float | None = None
    epochs: int = 2
    fails_at: int = -1
    shuffle: bool = True

    def module(self) -> Net:
        L.seed_everything(self.seed, verbose=False)
        return Net(self.width, self.optimizer, self.fails_at)

    def train(self) -> DataLoader[Any]:
        return DataLoader(samples(), batch_size=BATCH, shuffle=self.shuffle)

    def val(self) -> DataLoader[Any]:
        return DataLoader(samples(16), batch_size=BATCH)

    @property
    def trainer(self) -> dict[str, Any]:
        return {
            "max_epochs": self.epochs,
            "gradient_clip_val": self.clip,
            "logger": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
        }

    def trainer_on(self, device: torch.device) -> dict[str, Any]:
        """The trainer's options, with which two runs on this device have equal bits."""
        return self.trainer | ({"deterministic": True} if device.type == "cuda" else {})

    @property
    def options(self) -> dict[str, Any] | None:
        return {"optimizer": "host" if self.clip else "auto"} if self.offload else None

    def options_on(self, device: torch.device) -> dict[str, Any] | None:
        """The options on this device. On a GPU `auto` decides by the clock where updates run, and
        the host's have other last bits than the device's."""
        decided = device.type == "cuda" and self.offload and not self.clip
        return {"optimizer": "device"} if decided else self.options


KINDS: Mapping[str, JobKind] = {
    "adam": JobKind(1),
    "sgd": JobKind(2, "sgd", 24),
    "clipped": JobKind(3, clip=0.05),
    "plain": JobKind(4, "sgd", offload=False),
}


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a job became."""

    weights: Mapping[str, torch.Tensor]
    draws: tuple[float, ...]
    """The last draws: all of them, if the job was never resumed by another module."""
    logs: tuple[float, ...]

    @classmethod
    def of(cls, module: Net) -> "Outcome":
        weights = {key: value.clone() for key, value in module.state_dict().items()}
        return cls(weights, tuple(module.draws), tuple(module.logs))

    def differences(self, other: "Outcome") -> list[str]:
        """Name what differs from `other`, which may have only the last draws and logs."""
        pairs = [(key, value, other.weights[key]) for key, value in self.weights.items()]
        found = [key for key, mine, theirs in pairs if not torch.equal(mine, theirs)]
        for name in ("draws", "logs"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine[len(mine) - len(theirs) :] != theirs:
                found.append(name)
        return found


def alone(kind: JobKind, budget: str | int = BUDGET, device: torch.device = CPU) -> Outcome:
    """What plain Lightning with an OffloadStrategy of its own makes of it."""
    module = kind.module()
    options = kind.options_on(device)
    strategy: Any = "auto" if options is None else OffloadStrategy(budget=budget, **options)
    trainer = L.Trainer(
        **kind.trainer_on(device), strategy=strategy,
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, kind.train(), kind.val())
    return Outcome.of(module)


def program(kind: JobKind, module: Any = None) -> LightningJob:
    given = False if kind.options is None else kind.options
    make = module or kind.module
    return LightningJob(make, kind.train, kind.val, kind.trainer, given, None, None)


def make(folder: Path, **more: Any) -> Fleet:
    usual = {"devices": "cpu", "metric": "val_loss", "quantum": 3}
    return Fleet(BUDGET, folder=folder, **{**usual, **more})


def add(fleet: Fleet, name: str, kind: JobKind, module: Any = None, **more: Any) -> Net:
    module = module or kind.module()
    device = fleet.devices[0]
    options = kind.options_on(device)
    given = False if options is None else options
    trainer = kind.trainer_on(device)
    usual = {"train": kind.train(), "val": kind.val(), "trainer": trainer, "offload": given}
    if options is None and device.type == "cuda":
        usual["reserve"] = "64MiB"
    fleet.add(name, module, **{**usual, **more})
    return module


class AnySchedule:
    """Drives the jobs of one device in any order, by the host alone, without the fleet's rules."""

    def __init__(self, kinds: Mapping[str, JobKind], folder: Path, seed: int) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.chance = random.Random(seed)
        self.modules: dict[str, Net] = {}
        self.failed: dict[str, Failed] = {}
        self.steps = dict.fromkeys(kinds, 0)
        # Two devices of one kind with other budgets: a job that moves gets another plan.
        self._hosts = [
            DeviceHost(SeatSettings(CPU, n, budget, "val_loss", 1e9), self.events.put)
            for n, budget in enumerate((BUDGET, "100%"))
        ]
        self._jobs: dict[str, HostedJob] = {}
        for name, kind in kinds.items():
            module = kind.module()
            self.modules[name] = module
            state = RandomState.capture(CPU)
            self._jobs[name] = HostedJob(program(kind, module), folder / name, state)

    def do(self, command: Start | Turn | Leave) -> Event:
        self._hosts[command.device].do(command, self._jobs[command.job])
        event = self.events.get(timeout=60)
        if isinstance(event, Failed):
            self.failed[command.job] = event
        return event

    def run(self, moves: float = 0.1, longest: int = 5) -> None:
        """Run all jobs to their ends."""
        where: dict[str, int] = {}
        waiting = list(self._jobs)
        while waiting or where:
            if waiting and (not where or self.chance.random() < 0.5):
                name = waiting.pop(self.chance.randrange(len(waiting)))
                device = self.chance.randrange(2)
                event = self.do(Start(name, device))
                if not isinstance(event, Finished | Failed):
                    where[name] = device
                continue
            name = self.chance.choice(sorted(where))
            if self.chance.random() < moves:
                event = self.do(Leave(name, where[name], "moved"))
                if isinstance(event, Departed):
                    waiting.append(name)
                del where[name]
                continue
            steps, share = self.chance.randint(1, longest), self.chance.random() < 0.5
            event = self.do(Turn(name, where[name], steps, share))
            if isinstance(event, Finished | Failed):
                del where[name]

    def close(self) -> None:
        for host in self._hosts:
            host.close()
