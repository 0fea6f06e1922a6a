"""Two processes that train the same module, one with OffloadStrategy, one without, in turns.

    plain  |step x n|               |step x n|               one waits in front of a batch, inside
    ours             |step x n|               |step x n|     of `trainer.fit`, while the other steps

So both see the same machine at the same time, and neither has anything of the other's: no allocator
shim, no memory, no caches. A child reports CPU and wall seconds of some steps, and every loss.
"""

import hashlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.command import quiet_lightning
from benchmarks.harness.process import read_memory_mib, reset_peak_memory
from benchmarks.strategy.nets import Batch, EndlessBatches, Task
from trainers import OffloadStrategy

JOIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PairJob:
    make: Callable[..., tuple[Any, Sequence[Batch]]]
    """The net and its batches. Named at the top of a module: a child imports it."""
    arguments: tuple[Any, ...]
    optimizer: str
    budget: str | None = None
    """Of ours."""
    threads: int = 1
    """0: torch's own choice."""


@dataclass(frozen=True, slots=True)
class StepsTook:
    cpu: float
    wall: float
    losses: tuple[str, ...]
    """To the last bit."""


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    digest: str
    """Of all that was trained: parameters, buffers, optimizer state, by name."""
    rss_mib: float
    facts: dict[str, Any]
    """Of the plan."""


class TrainingPair:
    """The two processes; both end with the `with` block."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Any] = {}
        self._children = []
        for name in ("plain", "ours"):
            here, there = spawn.Pipe()
            child = spawn.Process(target=serve_jobs, args=(there, name == "ours"), daemon=True)
            child.start()
            there.close()
            self._pipes[name] = here
            self._children.append(child)

    def begin(self, job: PairJob) -> None:
        """One after the other, up to the first batch."""
        for name in self._pipes:
            self._ask(name, job)

    def step(self, name: str, steps: int) -> StepsTook:
        return self._ask(name, steps)

    def end(self) -> dict[str, TrainingEnd]:
        return {name: self._ask(name, 0) for name in self._pipes}

    def _ask(self, name: str, request: Any) -> Any:
        self._pipes[name].send(request)
        answer = self._pipes[name].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> "TrainingPair":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for child in self._children:
            child.join(JOIN_SECONDS)


class StepOnRequest(L.Callback):
    """Waits in front of a batch for the number of steps to make; 0 ends the fit."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
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
            self._pipe.send(StepsTook(cpu, wall, tuple(self._losses)))
        else:
            self._pipe.send("ready")
        self._losses = []
        self._left = self._pipe.recv()
        self._cpu, self._wall = process_time(), perf_counter()
        trainer.should_stop = not self._left

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(float(outputs["loss"]).hex())
        self._left -= 1


def serve_jobs(pipe: Connection, ours: bool) -> None:
    """In a child: one job after the other, until the pipe is closed."""
    quiet_lightning()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_fit(pipe, job, ours))
        except EOFError:
            return
        except BaseException as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
            raise


def _fit(pipe: Connection, job: PairJob, ours: bool) -> TrainingEnd:
    torch.set_num_threads(job.threads or torch.get_num_threads())
    torch.manual_seed(0)
    net, batches = job.make(*job.arguments)
    strategy: Any = OffloadStrategy(job.budget) if ours else "auto"
    module, trainer = Task(net, job.optimizer), make_quiet_trainer(strategy, StepOnRequest(pipe))
    torch.manual_seed(1)
    reset_peak_memory()
    trainer.fit(module, DataLoader(EndlessBatches(batches), batch_size=None))
    digest = digest_training(module, trainer.optimizers[0])
    return TrainingEnd(digest, read_memory_mib(), _plan_facts(strategy))


def make_quiet_trainer(strategy: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", strategy=strategy, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )  # fmt: skip


def digest_training(module: L.LightningModule, optimizer: torch.optim.Optimizer) -> str:
    """Of the module's and the optimizer's state, by name."""
    digest = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    named = [*module.state_dict().items()]
    named += [(f"{p}.{key}", value) for p, s in sorted(state.items()) for key, value in s.items()]
    for name, tensor in named:
        digest.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plan_facts(strategy: Any) -> dict[str, Any]:
    if strategy == "auto":
        return {}
    plan = strategy.plan
    return {
        "tasks": len(plan.graph.tasks), "placement": plan.placement,
        "peak_bytes": plan.peak_bytes, "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes, "predicted_s": plan.predicted_seconds,
    }  # fmt: skip
