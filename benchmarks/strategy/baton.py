"""Two processes that train the same module, one with OffloadStrategy, one without, in turns.

    plain  |step x n|               |step x n|               one waits in front of a batch, inside
    ours             |step x n|               |step x n|     of `trainer.fit`, while the other steps

So both see the same machine at the same time, and neither has anything of the other's: no allocator
shim, no memory, no caches. What a child says of some steps: CPU and wall seconds, and every loss.
"""

import hashlib
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from offloading.process import forget_peak, memory_mib
from torch.utils.data import DataLoader

from strategy.nets import Again, Batch, Task
from trainers import OffloadStrategy

JOIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    make: Callable[..., tuple[Any, Sequence[Batch]]]
    """The net and its batches. Named at the top of a module: a child imports it."""
    arguments: tuple[Any, ...]
    optimizer: str
    budget: str | None = None
    """Of ours."""
    threads: int = 1
    """0: torch's own choice."""


@dataclass(frozen=True, slots=True)
class Took:
    """Some steps."""

    cpu: float
    wall: float
    losses: tuple[str, ...]
    """To the last bit."""


@dataclass(frozen=True, slots=True)
class End:
    digest: str
    """Of all that was trained: parameters, buffers, optimizer state, by name."""
    rss_mib: float
    facts: dict[str, Any]
    """Of the plan."""


class Pair:
    """The two processes; both end with the `with` block."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._lines: dict[str, Any] = {}
        self._children = []
        for name in ("plain", "ours"):
            here, there = spawn.Pipe()
            child = spawn.Process(target=serve, args=(there, name == "ours"), daemon=True)
            child.start()
            there.close()
            self._lines[name] = here
            self._children.append(child)

    def begin(self, job: Job) -> None:
        """One after the other, up to the first batch."""
        for name in self._lines:
            self._ask(name, job)

    def step(self, name: str, steps: int) -> Took:
        return self._ask(name, steps)

    def end(self) -> dict[str, End]:
        return {name: self._ask(name, 0) for name in self._lines}

    def _ask(self, name: str, what: Any) -> Any:
        self._lines[name].send(what)
        answer = self._lines[name].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()
        for child in self._children:
            child.join(JOIN_SECONDS)


class Baton(L.Callback):
    """Waits in front of a batch until it is told how many steps to make; 0: this is the last."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._left = -1
        self._losses: list[str] = []
        self._cpu = self._wall = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._left > 0:
            return
        if self._left == 0:
            cpu, wall = process_time() - self._cpu, perf_counter() - self._wall
            self._line.send(Took(cpu, wall, tuple(self._losses)))
        else:
            self._line.send("ready")
        self._losses = []
        self._left = self._line.recv()
        self._cpu, self._wall = process_time(), perf_counter()
        trainer.should_stop = not self._left

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(float(outputs["loss"]).hex())
        self._left -= 1


def serve(line: Connection, ours: bool) -> None:
    """In a child: one job after the other, until nobody is at the other end."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    while True:
        try:
            job = line.recv()
        except EOFError:
            return
        try:
            line.send(_fit(line, job, ours))
        except EOFError:
            return
        except BaseException as error:
            line.send(RuntimeError(f"{type(error).__name__}: {error}"))
            raise


def _fit(line: Connection, job: Job, ours: bool) -> End:
    torch.set_num_threads(job.threads or torch.get_num_threads())
    torch.manual_seed(0)
    net, batches = job.make(*job.arguments)
    strategy: Any = OffloadStrategy(job.budget) if ours else "auto"
    module, trainer = Task(net, job.optimizer), quiet_trainer(strategy, Baton(line))
    torch.manual_seed(1)
    forget_peak()
    trainer.fit(module, DataLoader(Again(batches), batch_size=None))
    return End(digest(module, trainer.optimizers[0]), memory_mib(), facts(strategy))


def quiet_trainer(strategy: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", strategy=strategy, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )  # fmt: skip


def digest(module: L.LightningModule, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    named = [*module.state_dict().items()]
    named += [(f"{p}.{key}", value) for p, s in sorted(state.items()) for key, value in s.items()]
    for name, tensor in named:
        found.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def facts(strategy: Any) -> dict[str, Any]:
    if strategy == "auto":
        return {}
    plan = strategy.plan
    return {
        "tasks": len(plan.graph.tasks), "placement": plan.placement,
        "peak_bytes": plan.peak_bytes, "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes, "predicted_s": plan.predicted_seconds,
    }  # fmt: skip
