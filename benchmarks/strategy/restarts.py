"""Claim: with `plan_cache`, a second start makes its first step in 2 times plain Lightning's.

    plain     | step |
    first     | record | measure | search | prove | step |
    second    | record |                 1 | prove | step |       1: one walk instead of a search

Baseline plain Lightning's first step. Ceiling: 1, since the recording runs the user's code anyway.
Each start in a process of its own; CPU seconds of the process.
"""

import shutil
import statistics
import tempfile
from time import process_time
from typing import Any

import lightning as L
import torch
import torchvision
from torch.utils.data import DataLoader

from benchmarks.harness.command import Options, quiet_lightning
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.strategy.nets import Task, pictures
from benchmarks.strategy.pair import digest_training, make_quiet_trainer
from offload.memory.cpu_shim import available
from trainers import OffloadStrategy

ROUNDS = 7
BUDGET = "60%"
MOST = 2.0
SETTINGS = (("resnet18", 32, 224), ("efficientnet_b0", 16, 128), ("efficientnet_b0", 32, 224))
SMOKE = (("resnet18", 2, 32),)


def measure(options: Options) -> Report:
    report = Report(
        "restarts",
        "Claim: the second start of a run makes its first step in 2 times plain Lightning's",
        {"budget": BUDGET, "optimizer": "SGD", "rounds": options.rounds, "time": "CPU s"},
    )
    lines = []
    for net, rows, side in SMOKE if options.smoke else SETTINGS:
        name = f"{net}, {rows} x {side} x {side}"
        rounds = [start_three_times(net, rows, side) for _ in range(options.rounds)]
        report.rows.append({"name": name, "rounds": rounds})
        took = {kind: [starts[kind]["steps"][0] for starts in rounds] for kind in rounds[0]}
        over = {kind: round_ratios(took[kind], took["plain"]) for kind in ("first", "second")}
        later = [starts["second"]["steps"][1] for starts in rounds]
        lines.append([name, *map(format_spread, (*took.values(), *over.values(), later))])
        differ = sum(len({start["digest"] for start in starts.values()}) > 1 for starts in rounds)
        report.asked += [
            Target(f"{name}: second start, x plain", MOST, statistics.median(over["second"])),
            Target(f"{name}: final states that differ", 0, differ),
        ]
        print(" | ".join(lines[-1]), flush=True)
    report.tables["CPU s of the first step"] = format_table(
        ["net", "plain", "first start", "second start", "first, x plain", "second, x plain",
         "a later step of ours"], lines,
    )  # fmt: skip
    return report


def start_three_times(net: str, rows: int, side: int) -> dict[str, dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix="plan-cache-")
    try:
        return {
            kind: run_in_fresh_process(train, net, rows, side, cache)
            for kind, cache in (("plain", None), ("first", folder), ("second", folder))
        }
    finally:
        shutil.rmtree(folder)


def train(net: str, rows: int, side: int, cache: str | None) -> dict[str, Any]:
    """Two steps, in a fresh process. `cache`: the folder of plans; None: plain Lightning."""
    quiet_lightning()
    torch.set_num_threads(1)
    available()  # otherwise the first plan waits for the compiler
    torch.manual_seed(0)
    module = Task(getattr(torchvision.models, net)(num_classes=10), "SGD")
    strategy: Any = "auto" if cache is None else OffloadStrategy(BUDGET, plan_cache=cache)
    times = StepTimes()
    trainer = make_quiet_trainer(strategy, times)
    torch.manual_seed(1)
    batches: Any = [pictures(rows, side) for _ in range(2)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return {
        "steps": times.seconds, "digest": digest_training(module, trainer.optimizers[0]),
        "known": cache is not None and strategy.plan.found.known,
    }  # fmt: skip


class StepTimes(L.Callback):
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._begin = process_time()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(process_time() - self._begin)
