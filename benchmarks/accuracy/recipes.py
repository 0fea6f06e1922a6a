"""A task, a run on it, and the ways in which a run's phases are made.

A recipe is a list of stretches `(reuse, epochs)` walked under one learning-rate curve:

    wsd        warm-up, constant, then linear to 0 from `stable` on       ____\\
    cosine     one cosine over the whole run                              ~~\\_

Time is in epoch-equivalents. A curve's corner cuts a stretch in two phases, so reuse and learning
rate may change at different moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.orders import Order
from perfect.method.phases import Phase, PlateauRule
from perfect.method.schedule import Schedule

Stretch = tuple[int, float]
"""(reuse, epoch-equivalents)"""


@dataclass(frozen=True, slots=True)
class Task:
    """What every run of a preset shares."""

    net: str
    train: int
    holdout: int
    batch_size: int
    epochs: float
    lr: float
    weight_decay: float = 5e-4
    warmup: float = 0.0
    """Epoch-equivalents."""
    selection: int = 0
    """Held-out pictures read at a run's end, to choose between variants; 0: the hold-out's."""
    ema_epochs: float = 2.0
    """Horizon of the weight average."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pictures to train on, of the hold-out and of the selection."""
        return self.train, self.holdout, self.selection

    @property
    def epoch_steps(self) -> int:
        return self.train // self.batch_size

    def steps(self, epochs: float) -> int:
        return round(epochs * self.epoch_steps)


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the table."""

    name: str
    phases: tuple[Phase, ...]
    against: str | None = None
    """The row it is to be compared with: no reuse, same schedule or same decodes."""
    order: Order = "immediate"
    buffer_batches: int = 1
    plateau: PlateauRule | None = None


def wsd(
    task: Task, stretches: Sequence[Stretch], stable: float, *, reaugment: bool = True
) -> tuple[Phase, ...]:
    """Warm-up and constant until epoch `stable`, then linear to 0 at the end."""
    total = sum(epochs for _, epochs in stretches)
    phases: list[Phase] = []
    begin = 0.0
    for reuse, epochs in stretches:
        end = begin + epochs
        corner = min(max(stable, begin), end)
        for first, last in ((begin, corner), (corner, end)):
            if task.steps(last) > task.steps(first):
                constant = last <= stable
                lr = (
                    Schedule("constant", task.lr, warmup=task.warmup / stable,
                             part=(first / stable, last / stable))
                    if constant
                    else Schedule("linear", task.lr, part=_window(first, last, stable, total))
                )  # fmt: skip
                phases.append(_phase(task, phases, reuse, (first, last), reaugment, lr))
        begin = end
    return tuple(phases)


def cosine(
    task: Task,
    stretches: Sequence[Stretch],
    *,
    reaugment: bool = True,
) -> tuple[Phase, ...]:
    """One cosine over all stretches."""
    whole = sum(epochs for _, epochs in stretches)
    phases: list[Phase] = []
    begin = 0.0
    for reuse, epochs in stretches:
        end = begin + epochs
        curve = Schedule(
            "cosine", task.lr, warmup=task.warmup / whole, part=(begin / whole, end / whole)
        )
        phases.append(_phase(task, phases, reuse, (begin, end), reaugment, curve))
        begin = end
    return tuple(phases)


def with_ema(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    return tuple(replace(phase, ema=True) for phase in phases)


def without_reuse(name: str, phases: Sequence[Phase]) -> Run:
    """The control of a row: its learning rate at every step, and every serve fresh."""
    return Run(name, tuple(replace(phase, reuse=1) for phase in phases))


def _window(first: float, last: float, begin: float, end: float) -> tuple[float, float]:
    return (first - begin) / (end - begin), (last - begin) / (end - begin)


def _phase(
    task: Task,
    before: Sequence[Phase],
    reuse: int,
    span: tuple[float, float],
    reaugment: bool,
    lr: Schedule,
) -> Phase:
    name = f"{'reuse' if reuse > 1 else 'fresh'} {len(before)}" if before else "pretrain"
    steps = task.steps(span[1]) - task.steps(span[0])
    return Phase(name, reuse=reuse, steps=steps, reaugment=reaugment, lr=lr)
