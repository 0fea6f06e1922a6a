"""One run: the phases drive it, the reuse buffer orders it, a checkpoint survives it.

    pass p:  orders.plan -> positions --order of pass p--> ids -> pixels -> augment -> step
             every epoch-equivalent: hold-out, first-serve loss -> PhasePolicy.observe

A decode is a sample's first serve in its pass, counted when it is served: a pass that a phase cuts
short counts only what it touched. Augmentation is a function of (seed, pass, id, serve), so
`reaugment=False` is nothing but serve 0 again. The test set is read once, at the end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from accuracy.bench import Bench
from accuracy.data import Part
from accuracy.orders import counted_as, plan
from accuracy.recipes import Run, Task
from loaders.order.reuse import batches_per_pass
from loaders.order.serve import Serve
from loaders.order.source_order import source_order
from loaders.pixels.augmentation import Chain, Cutout, Draws, Flip, PadCrop, draw_keys
from perfect.callbacks.ema import Ema
from perfect.method.phases import Observation, Phase, PhasePolicy

Record = dict[str, Any]
"""What becomes JSON."""


class OutOfTime(Exception):
    """The deadline came; the checkpoint holds what was done."""


@dataclass(slots=True)
class Progress:
    """Where a run stands, apart from weights and policy."""

    passes: int = 0
    batch: int = 0
    """Batches served of the pass in progress."""
    decodes: int = 0
    served: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    history: list[Record] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Watch:
    """What a run needs from the outside while it goes on."""

    checkpoint: Path
    deadline: float
    """On the monotonic clock."""
    every: int = 10
    """Epoch-equivalents between checkpoints."""
    on_epoch: Callable[[Record], None] | None = None


def train(bench: Bench, run: Run, seed: int, watch: Watch) -> Record:
    """Train `run` to its end and say how it went, or raise `OutOfTime`."""
    return _Training(bench, run, seed, watch).finish()


class _Training:
    def __init__(self, bench: Bench, run: Run, seed: int, watch: Watch) -> None:
        self.bench, self.run, self.seed, self.watch = bench, run, seed, watch
        self.policy = PhasePolicy(run.phases, run.plateau)
        self.progress = Progress()
        bench.initialise(seed)
        self.optimizer = _optimizer(bench)
        self.augment = _augment(bench.task)
        self.ema = Ema(bench.net, 1 - 1 / max(1.0, bench.task.ema_epochs * bench.task.epoch_steps))
        self.loss_sum = torch.zeros((), device=bench.device)
        self.loss_count = 0
        self.started = time.process_time(), time.monotonic()

    def finish(self) -> Record:
        self._resume()
        self.bench.net.train()
        while not self.policy.finished:
            self._pass()
        if not self.progress.history or self.progress.history[-1]["served"] < self.progress.served:
            self._look()
        return self._record()

    def _pass(self) -> None:
        """Serve one pass, or as much of it as the phase's steps allow."""
        progress, phase = self.progress, self.policy.phase
        order = source_order(self.bench.task.train, seed=self.seed, pass_index=progress.passes)
        for number, serve in enumerate(self._plan(phase)):
            if number < progress.batch:
                continue
            if phase.steps is not None and self.policy.state.step >= phase.steps:
                break
            self._step(phase, order[serve.positions], serve.serves)
            progress.batch = number + 1
            if self._crosses_epoch(len(serve.positions)):
                self._look()
                self._guard()
        progress.passes, progress.batch = progress.passes + 1, 0
        self.policy.end_pass()

    def _plan(self, phase: Phase) -> Iterator[Serve]:
        task, run = self.bench.task, self.run
        batch, seed = phase.batch_size or task.batch_size, (self.seed, self.progress.passes)
        return plan(run.order, task.train, batch, phase.reuse, run.buffer_batches, seed)

    def _step(self, phase: Phase, ids: np.ndarray, serves: np.ndarray) -> None:
        bench, progress = self.bench, self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(phase)
        if self.policy.state.step == 0 and phase.reset_optimizer:
            self.optimizer.state.clear()
        at = torch.from_numpy(ids).to(bench.device)
        drawn_as = serves if phase.reaugment else np.zeros_like(serves)
        draws = Draws(draw_keys(self.seed, progress.passes, ids, drawn_as))
        images = bench.normalised(self.augment(bench.pictures.train.pixels[at], draws))
        with bench.autocast():
            scores = bench.forward(images)
        losses = F.cross_entropy(
            scores.float(), bench.pictures.train.labels[at], reduction="none",
            label_smoothing=bench.task.label_smoothing,
        )  # fmt: skip
        self.optimizer.zero_grad(set_to_none=True)
        losses.mean().backward()
        self.optimizer.step()
        self.ema.update(bench.net)
        first = serves == 0
        decoded = int(first.sum())
        if decoded:
            # A product, because picking by a mask makes a GPU wait for its own result.
            chosen = torch.from_numpy(first.astype(np.float32)).to(bench.device)
            self.loss_sum += (losses.detach() * chosen).sum()
        self.loss_count += decoded
        progress.decodes += decoded
        self.policy.served(len(ids) / bench.task.train, 1)

    def _lr(self, phase: Phase) -> float:
        step, steps = self.policy.state.step, self._planned(phase)
        return phase.lr.at_step(min(step, steps - 1), steps) if phase.lr else self.bench.task.lr

    def _planned(self, phase: Phase) -> int:
        """Optimizer steps of a phase that nothing ends early."""
        if phase.steps is not None:
            return phase.steps
        assert phase.passes is not None
        task, run = self.bench.task, self.run
        batch, mode = phase.batch_size or task.batch_size, counted_as(run.order)
        steps = batches_per_pass(task.train, batch, phase.reuse, mode, drop_last=True)
        return phase.passes * steps

    def _crosses_epoch(self, samples: int) -> bool:
        task, before = self.bench.task, self.progress.served
        self.progress.served = before + samples
        # Whole batches an epoch, so that looks fall on the same steps in every run.
        epoch = task.epoch_steps * task.batch_size
        return self.progress.served // epoch > before // epoch

    def _look(self) -> None:
        """The hold-out and the first-serve loss of the epoch that ended."""
        bench, phase = self.bench, self.policy.phase if not self.policy.finished else None
        loss = float(self.loss_sum) / self.loss_count if self.loss_count else None
        self.loss_sum.zero_()
        self.loss_count = 0
        ema = self.run.plateau is not None or (phase or self.run.phases[-1]).ema
        accuracy = self._accuracy(bench.pictures.holdout, ema)
        seen = Observation(self.policy.state.at, accuracy, loss)
        verdict = None
        if phase:
            done = self.policy.state.step / self._planned(phase)
            verdict = self.policy.observe(seen, done).verdict
        row: Record = {
            "at": round(seen.at, 4), "served": self.progress.served, "holdout": accuracy,
            "first_serve_loss": loss, "lr": self._lr(phase) if phase else 0.0,
            "decodes": self.progress.decodes,
            "verdict": asdict(verdict) if verdict else None,
        }  # fmt: skip
        self.progress.history.append(row)
        if self.watch.on_epoch:
            self.watch.on_epoch({"name": self.run.name, "seed": self.seed, **row})

    def _accuracy(self, part: Part, ema: bool) -> float:
        if not ema:
            return self.bench.accuracy(part)
        self.ema.swap(self.bench.net)
        try:
            return self.bench.accuracy(part)
        finally:
            self.ema.swap(self.bench.net)

    # ---- time and checkpoints ---------------------------------------------------------------

    def _guard(self) -> None:
        late = time.monotonic() > self.watch.deadline
        if late or len(self.progress.history) % self.watch.every == 0:
            self._save()
        if late:
            raise OutOfTime

    def _charge(self) -> None:
        """Book the time since the last booking."""
        now = time.process_time(), time.monotonic()
        self.progress.cpu_seconds += now[0] - self.started[0]
        self.progress.wall_seconds += now[1] - self.started[1]
        self.started = now

    def _save(self) -> None:
        self._charge()
        state = {
            "key": [self.run.name, self.seed],
            "phases": repr(self.run.phases),
            "net": self.bench.net.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "policy": self.policy.state_dict(),
            "last_steps": self.policy.phases[-1].steps,
            "progress": asdict(self.progress),
        }
        partial = self.watch.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.watch.checkpoint)

    def _resume(self) -> None:
        path = self.watch.checkpoint
        if not path.exists():
            return
        state = torch.load(path, map_location=self.bench.device, weights_only=True)
        mine = [self.run.name, self.seed], repr(self.run.phases)
        if (state["key"], state["phases"]) != mine:
            return
        self.bench.net.load_state_dict(state["net"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy.load_state_dict(state["policy"])
        last = replace(self.policy.phases[-1], steps=state["last_steps"])
        self.policy.phases = (*self.policy.phases[:-1], last)
        self.progress = Progress(**state["progress"])

    def _record(self) -> Record:
        bench, progress = self.bench, self.progress
        self._charge()
        parts = {"selection": bench.pictures.selection, "test": bench.pictures.test}
        scores = {
            f"{part}_{kind}": self._accuracy(pictures, kind == "ema")
            for part, pictures in parts.items()
            for kind in ("last", "ema")
        }
        ema = self.run.phases[-1].ema
        return {
            "name": self.run.name, "seed": self.seed,
            "test": scores["test_ema" if ema else "test_last"],
            "selection": scores["selection_ema" if ema else "selection_last"], **scores,
            "reported": "ema" if ema else "last",
            "steps": self.policy.state.total_steps, "decodes": progress.decodes,
            "fresh": progress.decodes / bench.task.train,
            "epochs": self.policy.state.at,
            "cpu_seconds": progress.cpu_seconds, "wall_seconds": progress.wall_seconds,
            "switches": [asdict(switch) for switch in self.policy.switches],
            "history": progress.history,
        }  # fmt: skip


def _augment(task: Task) -> Chain:
    shifted = (PadCrop(4), Flip())
    return Chain((*shifted, Cutout(task.cutout)) if task.cutout else shifted)


def _optimizer(bench: Bench) -> torch.optim.Optimizer:
    weights = [p for p in bench.net.parameters() if p.ndim > 1]
    others = [p for p in bench.net.parameters() if p.ndim <= 1]
    groups: Sequence[Record] = [
        {"params": weights, "weight_decay": bench.task.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = True if bench.device.type == "cuda" else None
    return torch.optim.SGD(groups, lr=bench.task.lr, momentum=0.9, nesterov=True, fused=fused)
