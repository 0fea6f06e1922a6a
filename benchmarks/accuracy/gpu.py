"""Presets for a GPU: ResNet-18 at two scales, and a quick net with many seeds.

    S1  60 epoch-equivalents, batch 512, 3 seeds: effects against their controls
    S2  the thesis's 200 epochs, batch 2048, 1 seed: does its effect survive its own controls
    S3  30 epochs of the quick net, 12 seeds: error bars for the ordering of variants

One command each, `--minutes 8.5`, again until it says nothing is missing. Part of the training set
is held out, so an epoch is 45,000 (S1, S3) or 49,000 (S2) pictures.
"""

from dataclasses import replace

from accuracy.pilot import STABLE
from accuracy.recipes import Run, Task, cosine, re_raised, with_ema, wsd
from perfect.phases import Phase, PlateauRule, budget_split
from perfect.schedule import Schedule

S1 = Task("resnet18", 45_000, 5000, batch_size=512, epochs=60, lr=0.2, warmup=3)
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
            replace(task, net=net, epochs=length, warmup=0.1 * length, **small)
            for task, net, length in zip(tasks, nets, epochs, strict=True)
        )
    first, second, third = tasks
    return {
        "S1": (first, scaled_runs(first), 3),
        "S2": (second, thesis_runs(second), 1),
        "S3": (third, ordering_runs(third), 12),
    }


def scaled_runs(task: Task) -> list[Run]:
    unit = task.epochs / 60
    stable = STABLE * task.epochs
    base, short = "no reuse 60, wsd", "no reuse 27, wsd"
    split40 = [(3, 36 * unit), (1, 24 * unit)]
    split55 = [(3, 49.5 * unit), (1, 10.5 * unit)]
    late = split55[0][1]
    best = with_ema(wsd(task, split55, late))
    return [
        Run(base, wsd(task, [(1, task.epochs)], stable)),
        Run(short, wsd(task, [(1, 27 * unit)], STABLE * 27 * unit), base),
        Run("reuse only 20x3 k1 no, cosine",
            cosine(task, [(3, task.epochs)], reaugment=False), base),
        Run("perfect 12x3+24 re k1, re-raised", re_raised(task, split40[0], 24 * unit), base),
        Run("perfect 16.5x3+10.5 no k1, re-raised",
            re_raised(task, split55[0], 10.5 * unit, reaugment=False), base),
        Run("wsd 12x3+24 k3 re", wsd(task, split40, stable), base, "block", 3),
        Run("wsd 16.5x3+10.5 k3 re", wsd(task, split55, late), base, "block", 3),
        Run("auto roll3 re ema", best, base, "rolling", 3,
            plateau=PlateauRule(not_before=0.25 * task.epochs)),
        Run("no reuse 60, rate re-raised at 60 %",
            re_raised(task, (1, 36 * unit), 24 * unit), base),
        Run("best: wsd 16.5x3+10.5 roll3 re ema", best, base, "rolling", 3),
    ]  # fmt: skip


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
    return [
        Run(base, cosine(task, [(1, task.epochs)])),
        Run("no reuse 90, cosine .1", cosine(task, [(1, 90 * unit)]), base),
        Run(high, cosine(task, [(1, task.epochs)], lr=3.5 * task.lr), base),
        Run("40x3+80 re k1, cosine .35", cosine(task, split40, lr=3.5 * task.lr), high),
        Run("55x3+35 no k1, onecycle .118 bs 2432",
            re_raised(task, (3, 165 * unit), 35 * unit, reaugment=False, batch_size=larger,
                      curve=Schedule("onecycle", 0.118)), base),
        Run("65x3+10 no k1, onecycle .195 bs 320",
            re_raised(task, (3, 195 * unit), 10 * unit, reaugment=False, batch_size=small,
                      curve=Schedule("onecycle", 0.195)), base),
        Run("reuse only 66.7x3 re k1, cosine .1", cosine(task, [(3, task.epochs)]), base),
        Run("auto roll3 re ema", auto, base, "rolling", 3,
            plateau=PlateauRule(window=max(12, round(0.075 * task.epochs)),
                                not_before=0.25 * task.epochs)),
    ]  # fmt: skip


def ordering_runs(task: Task) -> list[Run]:
    total, base = task.epochs, "no reuse, cosine"
    late = 0.825 * total
    split55 = [(3, late), (1, total - late)]

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
        Run("wsd55 roll3 re", wsd(task, split55, late), base, "rolling", 3),
    ]
