"""One run: the phases drive it, the reuse buffer orders it.

    pass p:  plan_pass -> positions --order of pass p--> ids -> pixels -> augment -> step
             every epoch-equivalent: hold-out, first-serve loss -> PhasePolicy.observe

A decode is a sample's first serve in its pass, counted when it is served: a pass that a phase cuts
short counts only what it touched. Augmentation is a function of (seed, pass, id, serve), so
`reaugment=False` is nothing but serve 0 again. The test set is read once, at the end.
"""

import time
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.accuracy.data import CLASSES, Part, Pictures
from benchmarks.accuracy.orders import counted_as, plan_pass
from benchmarks.accuracy.recipes import Run, Task
from loaders.order.keyed_permutation import source_order
from loaders.order.reuse import batches_per_pass
from loaders.pixels.augmentation import Chain, Draws, Flip, PadCrop, draw_keys
from perfect.callbacks.ema import Ema
from perfect.method.phases import Observation, Phase, PhasePolicy
from perfect.models import build_model

EVAL_BATCH = 1000
AUGMENT = Chain((PadCrop(4), Flip()))


def train(task: Task, pictures: Pictures, run: Run, seed: int) -> dict[str, Any]:
    """Train `run` to its end, and return its record."""
    return _Training(task, pictures, run, seed).finish()


class _Training:
    def __init__(self, task: Task, pictures: Pictures, run: Run, seed: int) -> None:
        self.task, self.pictures, self.run, self.seed = task, pictures, run, seed
        torch.manual_seed(seed)
        net = build_model(task.net, num_classes=CLASSES)
        self.net = net.to(memory_format=torch.channels_last)
        self.policy = PhasePolicy(run.phases, run.plateau)
        self.optimizer = _make_optimizer(self.net, task)
        self.ema = Ema(self.net, 1 - 1 / max(1.0, task.ema_epochs * task.epoch_steps))
        self.passes = self.decodes = self.served = 0
        self.loss_sum, self.loss_count = torch.zeros(()), 0

    def finish(self) -> dict[str, Any]:
        cpu, wall = time.process_time(), time.monotonic()
        self.net.train()
        while not self.policy.finished:
            self._serve_pass()
        parts = {"selection": self.pictures.selection, "test": self.pictures.test}
        scores = {
            f"{part}_{kind}": self._accuracy(pictures, kind == "ema")
            for part, pictures in parts.items()
            for kind in ("last", "ema")
        }
        reported = "ema" if self.run.phases[-1].ema else "last"
        return {
            "test": scores[f"test_{reported}"], "selection": scores[f"selection_{reported}"],
            **scores, "weights": reported, "decodes": self.decodes,
            "steps": self.policy.state.total_steps,
            "cpu_seconds": time.process_time() - cpu, "wall_seconds": time.monotonic() - wall,
            "switches": [(switch.at, switch.reason) for switch in self.policy.switches],
        }  # fmt: skip

    def _serve_pass(self) -> None:
        """One pass, or as much of it as the phase's steps allow."""
        task, run, phase = self.task, self.run, self.policy.phase
        order = source_order(task.train, seed=self.seed, pass_index=self.passes)
        batch = phase.batch_size or task.batch_size
        seed = (self.seed, self.passes)
        for serve in plan_pass(run.order, task.train, batch, phase.reuse, run.buffer_batches, seed):
            if phase.steps is not None and self.policy.state.step >= phase.steps:
                break
            self._step(phase, order[serve.positions], serve.serves)
            if self._crosses_epoch(len(serve.positions)):
                self._observe()
        self.passes += 1
        self.policy.end_pass()

    def _step(self, phase: Phase, ids: np.ndarray, serves: np.ndarray) -> None:
        train = self.pictures.train
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(phase)
        if self.policy.state.step == 0 and phase.reset_optimizer:
            self.optimizer.state.clear()
        places = torch.from_numpy(ids)
        drawn_as = serves if phase.reaugment else np.zeros_like(serves)
        draws = Draws(draw_keys(self.seed, self.passes, ids, drawn_as))
        scores = self.net(self.pictures.normalise(AUGMENT(train.pixels[places], draws)))
        losses = functional.cross_entropy(scores.float(), train.labels[places], reduction="none")
        self.optimizer.zero_grad(set_to_none=True)
        losses.mean().backward()
        self.optimizer.step()
        self.ema.update(self.net)
        first = torch.from_numpy((serves == 0).astype(np.float32))
        decoded = int(first.sum())
        if decoded:
            self.loss_sum += (losses.detach() * first).sum()
        self.loss_count += decoded
        self.decodes += decoded
        self.policy.served(len(ids) / self.task.train, 1)

    def _rate(self, phase: Phase) -> float:
        step, steps = self.policy.state.step, self._planned_steps(phase)
        return phase.lr.at_step(min(step, steps - 1), steps) if phase.lr else self.task.lr

    def _planned_steps(self, phase: Phase) -> int:
        """Optimizer steps of a phase that nothing ends early."""
        if phase.steps is not None:
            return phase.steps
        assert phase.passes is not None
        batch, mode = phase.batch_size or self.task.batch_size, counted_as(self.run.order)
        steps = batches_per_pass(self.task.train, batch, phase.reuse, mode, drop_last=True)
        return phase.passes * steps

    def _crosses_epoch(self, samples: int) -> bool:
        before, self.served = self.served, self.served + samples
        # Whole batches an epoch, so that looks fall on the same steps in every run.
        epoch = self.task.epoch_steps * self.task.batch_size
        return self.served // epoch > before // epoch

    def _observe(self) -> None:
        """Show the policy the hold-out and the first-serve loss of the epoch that ended."""
        loss = float(self.loss_sum) / self.loss_count if self.loss_count else None
        self.loss_sum.zero_()
        self.loss_count = 0
        if not self.policy.finished:
            phase = self.policy.phase
            ema = self.run.plateau is not None or phase.ema
            accuracy = self._accuracy(self.pictures.holdout, ema)
            seen = Observation(self.policy.state.at, accuracy, loss)
            self.policy.observe(seen, self.policy.state.step / self._planned_steps(phase))

    def _accuracy(self, part: Part, ema: bool) -> float:
        if ema:
            self.ema.swap(self.net)
        try:
            return self._score(part)
        finally:
            if ema:
                self.ema.swap(self.net)

    @torch.no_grad()
    def _score(self, part: Part) -> float:
        self.net.eval()
        right = 0
        for first in range(0, len(part), EVAL_BATCH):
            chosen = slice(first, first + EVAL_BATCH)
            scores = self.net(self.pictures.normalise(part.pixels[chosen]))
            right += int((scores.argmax(1) == part.labels[chosen]).sum())
        self.net.train()
        return right / len(part)


def _make_optimizer(net: torch.nn.Module, task: Task) -> torch.optim.Optimizer:
    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [
        {"params": weights, "weight_decay": task.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=task.lr, momentum=0.9, nesterov=True)
