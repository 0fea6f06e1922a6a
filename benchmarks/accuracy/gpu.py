"""Presets for a GPU: ResNet-18 at two scales, and a quick net with many seeds.

    S1  60 epoch-equivalents, batch 512, 3 seeds: our recipe and the thesis's, cutout in every row
    S2  the thesis's 200 epochs, batch 2048, 1 seed: does its effect survive its own controls
    S3  30 epochs of the quick net, 12 seeds: error bars for the ordering of variants

Every row that reuses is compared with a row that has the same learning rate at every step, does not
reuse and is judged on the same weights; a record has the accuracy of the last ones and of the
averaged ones (EMA). One command each, `--minutes 8.5`, again until it says nothing is missing. Part
of the training set is held out, so an epoch is 49,000 (S1, S2) or 45,000 (S3) pictures.
"""

import math
from dataclasses import replace

from accuracy.pilot import STABLE
from accuracy.recipes import Run, Task, cosine, re_raised, with_ema, without_reuse, wsd
from perfect.method.phases import Phase, PlateauRule, budget_split
from perfect.method.schedule import Schedule

S1 = Task(
    "resnet18", 49_000, 1000, batch_size=512, epochs=60, lr=0.2, warmup=3, cutout=12,
    label_smoothing=0.1,
)  # fmt: skip
S2 = Task("resnet18", 49_000, 1000, batch_size=2048, epochs=200, lr=0.1)
S3 = Task("quick", 45_000, 5000, batch_size=500, epochs=30, lr=0.3, warmup=3)

GpuPreset = tuple[Task, list[Run], int]
"""(task, runs, seeds)"""


def gpu_presets(tiny: bool = False) -> dict[str, GpuPreset]:
    """`tiny`: the same runs on a few synthetic pictures, to see that they work at first try."""
    tasks = (S1, S2, S3)
    if tiny:
        small = {"train": 240, "holdout": 60, "batch_size": 20}
        nets = ("pilot", "pilot", "quick-tiny")
        # Long enough for the shortest stretch of each preset to be at least a step.
        epochs = (1.0, 4.0, 1.0)
        tasks = tuple(
            replace(task, net=net, epochs=length, warmup=0.1 * length, bfloat16=False, **small)
            for task, net, length in zip(tasks, nets, epochs, strict=True)
        )
    first, second, third = tasks
    return {
        "S1": (first, scaled_runs(first), 3),
        "S2": (second, thesis_runs(second), 1),
        "S3": (third, ordering_runs(third), 12),
    }


def scaled_runs(task: Task) -> list[Run]:
    """Accuracies are those of the averaged weights (EMA), in every row."""
    unit = task.epochs / 60
    stable, late = STABLE * task.epochs, 51 * unit
    base, base_late = "no reuse 60, wsd", "no reuse 60, wsd, late decay"
    base_cosine = "no reuse 60, cosine"
    raised, raised_late = (f"no reuse 60, rate re-raised at {at} %" for at in (60, 85))
    split = [(3, late), (1, task.epochs - late)]
    ours = wsd(task, split, late)
    thesis = re_raised(task, (3, stable), task.epochs - stable)
    thesis_late = re_raised(task, split[0], split[1][1], reaugment=False)
    equal = f"no reuse, 26 fresh in {task.epochs:g} epochs' updates, wsd"
    rows = [
        without_reuse(base_late, ours),
        Run("best: wsd 17x3+9 roll12 re", ours, base_late, "rolling", 12),
        Run("wsd 17x3+9 roll3 re", ours, base_late, "rolling", 3),
        Run(base, wsd(task, [(1, task.epochs)], stable), base_late),
        Run(equal, _equal_updates(task, 26 * unit), base_late),
        Run("no reuse 26, wsd", wsd(task, [(1, 26 * unit)], STABLE * 26 * unit), base_late),
        Run("auto roll12 re", ours, base_late, "rolling", 12,
            plateau=PlateauRule(not_before=0.25 * task.epochs)),
        Run("wsd 12x3+24 k3 re", wsd(task, [(3, stable), (1, task.epochs - stable)], stable),
            base, "block", 3),
        Run("wsd 17x3+9 k3 re", ours, base_late, "block", 3),
        Run(base_cosine, cosine(task, [(1, task.epochs)]), base_late),
        Run("reuse only 20x3 k1 no, cosine",
            cosine(task, [(3, task.epochs)], reaugment=False), base_cosine),
        without_reuse(raised, thesis),
        Run("perfect 12x3+24 re k1, re-raised", thesis, raised),
        without_reuse(raised_late, thesis_late),
        Run("perfect 17x3+9 no k1, re-raised", thesis_late, raised_late),
    ]  # fmt: skip
    return [replace(row, phases=with_ema(row.phases)) for row in rows]


def _equal_updates(task: Task, epochs: float) -> tuple[Phase, ...]:
    """As many updates as the task has, each of fewer pictures, at a rate that goes with the root of
    their number."""
    updates = task.steps(task.epochs)
    batch = max(1, round(epochs * task.train / updates))
    rate = round(task.lr * math.sqrt(batch / task.batch_size), 3)
    scaled = replace(task, lr=rate)
    phases = wsd(scaled, [(1, task.epochs)], STABLE * task.epochs)
    return tuple(replace(phase, batch_size=batch) for phase in phases)


def thesis_runs(task: Task) -> list[Run]:
    """Chapter 4's settings, with the two controls that it lacks: same decodes, same higher rate."""
    unit = task.epochs / 200
    base, high = "no reuse 200, cosine .1", "no reuse 200, cosine .35"
    split40 = [(3, 120 * unit), (1, 80 * unit)]
    small = task.batch_size // 10 if task.batch_size < 320 else 320
    larger = task.batch_size * 2432 // 2048
    # Latest start for 110 fresh passes of 200, as the thesis's budget identity gives it.
    budget = budget_split(110, 200, 3)
    auto = with_ema(
        wsd(task, [(3, 3 * budget.pretrain * unit), (1, budget.finetune * unit)],
            3 * budget.pretrain * unit)
    )  # fmt: skip
    split55 = re_raised(
        task, (3, 165 * unit), 35 * unit, reaugment=False, batch_size=larger,
        curve=Schedule("onecycle", 0.118),
    )  # fmt: skip
    split65 = re_raised(
        task, (3, 195 * unit), 10 * unit, reaugment=False, batch_size=small,
        curve=Schedule("onecycle", 0.195),
    )  # fmt: skip
    return [
        Run(base, cosine(task, [(1, task.epochs)])),
        Run("no reuse 90, cosine .1", cosine(task, [(1, 90 * unit)]), base),
        Run(high, cosine(task, [(1, task.epochs)], lr=3.5 * task.lr), base),
        Run("40x3+80 re k1, cosine .35", cosine(task, split40, lr=3.5 * task.lr), high),
        Run("55x3+35 no k1, onecycle .118 bs 2432", split55, "no reuse, onecycle .118 bs 2432"),
        Run("65x3+10 no k1, onecycle .195 bs 320", split65, "no reuse, onecycle .195 bs 320"),
        Run("reuse only 66.7x3 re k1, cosine .1", cosine(task, [(3, task.epochs)]), base),
        Run("auto roll3 re ema", auto, "no reuse 200, wsd, latest decay, ema", "rolling", 3,
            plateau=PlateauRule(window=max(12, round(0.075 * task.epochs)),
                                not_before=0.25 * task.epochs)),
        without_reuse("no reuse 200, wsd, latest decay, ema", auto),
        without_reuse("no reuse, onecycle .118 bs 2432", split55),
        without_reuse("no reuse, onecycle .195 bs 320", split65),
    ]  # fmt: skip


def ordering_runs(task: Task) -> list[Run]:
    total, base, base_late = task.epochs, "no reuse, cosine", "no reuse, wsd, late decay"
    late = 0.825 * total
    split55 = wsd(task, [(3, late), (1, total - late)], late)

    def reuse(repeats: int, *, reaugment: bool = True) -> tuple[Phase, ...]:
        return cosine(task, [(repeats, total)], reaugment=reaugment)

    return [
        Run(base, cosine(task, [(1, total)])),
        Run("no reuse, 1/3 fresh, cosine", cosine(task, [(1, total / 3)]), base),
        Run("r3 k1 no", reuse(3, reaugment=False), base),
        Run("r3 k1 re", reuse(3), base),
        Run("r3 k3 re", reuse(3), base, "block", 3),
        Run("r3 roll3 re", reuse(3), base, "rolling", 3),
        Run("r6 roll3 re", reuse(6), base, "rolling", 3),
        Run("in-batch x3 re", reuse(3), base, "in-batch"),
        without_reuse(base_late, split55),
        Run("wsd55 roll3 re", split55, base_late, "rolling", 3),
        Run("wsd55 roll12 re", split55, base_late, "rolling", 12),
    ]
