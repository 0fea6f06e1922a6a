"""A peer that is told which lanes it adds in each step, and in which order: no swarm, no anchor.

    deal of a step     ((0, 3, 4), (7,))  ((1, 2, 5, 6),)      two contributors
                        first   then       the other one       what a kill leaves is dealt again

What all contributors add up is summed in their order, as the canonical reduce does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import lightning as L
import pytest
import torch
from support.planned_peer import CLIPS, OPTIMIZERS, Classifier, data, state_of
from torch.nn import functional

from loaders import ReuseLoader
from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.errors import SwarmStopped
from trainers.elastic.peer.elastic_fit import Commits, ElasticFit
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.reducing.canonical import sum_in_order
from trainers.elastic.work import planned_work
from trainers.elastic.work.digests import Commit, digest_of
from trainers.elastic.work.plain_work import PlainWork

LANES, MICRO, WIDTH = 9, 4, 160
SAMPLES = 166
"""A pass has five steps; in the last one four lanes have 3 samples, and five have 2."""
Deal = Sequence[Sequence[Sequence[int]]]
"""The lanes of each contributor, in as many parts as it was asked for them."""


class Wide(Classifier):
    """Weights that are worth a copy; statistics, a buffer that is read, dropout."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        torch.manual_seed(11)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.3),
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 4),
        )  # fmt: skip


class Bare(L.LightningModule):
    """No statistics, no random numbers, no logs."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4),
        )  # fmt: skip
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


@dataclass
class DealtCommits(Commits):
    """Commits of lanes that one process computes as several peers."""

    deals: Sequence[Deal]
    told: Sequence[Commit] = ()
    """The first commits, which a newcomer hears of."""
    found: list[Commit] = field(default_factory=list)

    def next(self, work: PlainWork) -> Commit:
        step = len(self.found)
        if step < len(self.told):
            return self.told[step]
        sums: list[torch.Tensor] = []
        logs: list[LaneLogs] = []
        added: list[tuple[str, tuple[int, ...]]] = []
        buffers: tuple[torch.Tensor, ...] = ()
        for number, parts in enumerate(self.deals[step]):
            work.begin(step)
            there = work.lanes()
            done: tuple[int, ...] = ()
            for part in parts:
                left = tuple(lane for lane in part if lane in there)
                while left:
                    count = work.compute(left)
                    assert count >= 1
                    done, left = done + left[:count], left[count:]
            if why := work.trouble():
                raise SwarmStopped(why)
            sums.append(work.sums.clone())
            logs.append(work.logs)
            added.append((f"peer {number}", done))
            if there[0] in done:
                buffers = work.buffers()
        total = sum_in_order(sums)
        digest = digest_of([total, *buffers])
        whole = reduce(LaneLogs.plus, logs)
        return Commit(step, tuple(added), work.as_floats(total), whole, buffers, digest)

    def applied(self, commit: Commit) -> None:
        self.found.append(commit)

    def close(self) -> None: ...


class DealtStrategy(ElasticFit):
    strategy_name = "dealt"

    def __init__(self, dealt: DealtCommits, budget: Any, sum: Any, device: str) -> None:
        super().__init__(LANES * MICRO, LANES, sum, budget, device=device)
        self.dealt = dealt

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        return self.dealt


@dataclass
class Notes(L.Callback):
    """What each step leaves, and what ran."""

    logs: list[dict[str, float]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """The step, and how many lanes ran together."""
    told: str = ""
    """What the plan of the latest lanes says."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **more: Any) -> None:
        self.logs.append({name: float(v) for name, v in trainer.callback_metrics.items()})
        self.states.append(state_of(trainer, pl_module))
        strategy = trainer.strategy
        self.samples.append(sorted(strategy._shares.last_batch.ids.tolist()))
        self.told = "" if strategy.plan is None else strategy.plan.explain()

    def sizes(self, step: int) -> list[int]:
        return [size for at, size in self.runs if at == step]


@dataclass
class DealtRun:
    notes: Notes
    commits: list[Commit]
    trainer: L.Trainer


def dealt(
    deals: Sequence[Deal], budget: Any = None, *, module: Any = None, optimizer: str = "adamw",
    clip: str = "norm", sum: str = "fast", dataset: Any = None, callbacks: Sequence[Any] = (),
    device: str = "cpu", told: Sequence[Commit] = (),
) -> DealtRun:  # fmt: skip
    """Train a step for each deal. A pass ends with smaller lanes."""
    module = Wide(optimizer) if module is None else module
    loader = ReuseLoader(
        dataset or data(SAMPLES), batch_size=LANES * MICRO, reuse=1, buffer_batches=2, seed=3,
        workers=1,
    )  # fmt: skip
    strategy, notes = DealtStrategy(DealtCommits(deals, told), budget, sum, device), Notes()
    trainer = L.Trainer(
        strategy=strategy, max_steps=len(deals), max_epochs=-1, callbacks=[*callbacks, notes],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
        accelerator="cpu" if device == "cpu" else "gpu", **CLIPS[clip],
    )  # fmt: skip
    compute = PlainWork.compute

    def computes(work: PlainWork, lanes: Sequence[int]) -> int:
        count = compute(work, lanes)
        notes.runs.append((trainer.global_step, count))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainWork, "compute", computes)
        trainer.fit(module, loader)
    return DealtRun(notes, strategy.dealt.found, trainer)


def assert_same(one: DealtRun, other: DealtRun) -> None:
    """Losses and other logs, samples, totals, weights and optimizer state after every step."""
    assert [c.digest for c in one.commits] == [c.digest for c in other.commits]
    assert [c.logs for c in one.commits] == [c.logs for c in other.commits]
    assert [c.added for c in one.commits] == [c.added for c in other.commits]
    assert one.notes.logs == other.notes.logs
    assert one.notes.samples == other.notes.samples
    for step, (a, b) in enumerate(zip(one.notes.states, other.notes.states, strict=True)):
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == [], step


def always(patch: pytest.MonkeyPatch, size: int) -> None:
    """Have groups of this size chosen, however slow these tiny models are so, and whatever a busy
    machine's seconds make of the plan of single lanes."""
    patch.setattr(planned_work, "_copies_weights", lambda _: True)
    patch.setattr(planned_work, "SIZES", tuple(sorted({1, size})))
    patch.setattr(planned_work, "FASTER", 1e9)
