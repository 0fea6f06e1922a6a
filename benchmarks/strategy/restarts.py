"""The first step of a run that was started before, with `plan_cache`: against plain Lightning's.

    plain     | step |
    first     | record | measure | search | prove | step |
    second    | record |                 1 | prove | step |       1: one walk instead of a search

Each start in a process of its own; CPU seconds of the process. What is left of the second start is
mostly the recording, which runs the user's code and cannot be kept. It grows less with the batch
than a step does, so the ratio falls with a larger one.
"""

import logging
import shutil
import statistics
import tempfile
import warnings
from time import process_time
from typing import Any

import lightning as L
import torch
import torchvision
from offloading.process import in_a_fresh_process
from offloading.report import Asked, Report, spread, table
from torch.utils.data import DataLoader

from offload.memory.cpu_shim import available
from strategy.baton import digest, quiet_trainer
from strategy.nets import Task
from strategy.plan import STAGES, Seen
from trainers import OffloadStrategy

BUDGET = "60%"
MOST = 2.0
SETTINGS = (("resnet18", 32, 224), ("efficientnet_b0", 16, 128), ("efficientnet_b0", 32, 224))
SMOKE = (("resnet18", 2, 32),)


def measure(smoke: bool, repeats: int) -> Report:
    report = Report(
        "restarts",
        "Claim: the second start of a run makes its first step in 2 times plain Lightning's",
        {"budget": BUDGET, "optimizer": "SGD", "rounds": repeats, "time": "CPU s of the process"},
    )
    lines, parts = [], []
    for net, rows, side in SMOKE if smoke else SETTINGS:
        rounds = []
        for _ in range(repeats):
            folder = tempfile.mkdtemp(prefix="plan-cache-")
            try:
                rounds.append({
                    "plain": in_a_fresh_process(one, net, rows, side, None),
                    "first": in_a_fresh_process(one, net, rows, side, folder),
                    "second": in_a_fresh_process(one, net, rows, side, folder),
                })  # fmt: skip
            finally:
                shutil.rmtree(folder)
        name = f"{net}, {rows} x {side} x {side}"
        report.rows.append({"name": name, "rounds": rounds})
        took = {kind: [found[kind]["steps"][0] for found in rounds] for kind in rounds[0]}
        ratios = {
            kind: [mine / plain for mine, plain in zip(took[kind], took["plain"], strict=True)]
            for kind in ("first", "second")
        }
        later = [found["second"]["steps"][1] for found in rounds]
        lines.append([
            name, *(spread(took[kind]) for kind in took), *(spread(r) for r in ratios.values()),
            spread(later),
        ])  # fmt: skip
        stages = rounds[-1]["second"]["cpu"]
        parts.append([name, *(f"{stages.get(stage, 0.0):.2f}" for stage in (*STAGES, "all"))])
        asked = statistics.median(ratios["second"])
        report.asked.append(Asked(f"{name}: second start, x plain", MOST, asked))
        differ = sum(len({found[kind]["digest"] for kind in found}) > 1 for found in rounds)
        report.asked.append(Asked(f"{name}: final states that differ", 0, float(differ)))
        print(" | ".join(lines[-1]), flush=True)
    report.tables["CPU s of the first step"] = table(
        ["net", "plain", "first start", "second start", "first, x plain", "second, x plain",
         "a later step of ours"], lines,
    )  # fmt: skip
    report.tables["Where the second start's first step goes: CPU s"] = table(
        ["net", *STAGES, "all before the step"], parts
    )
    report.remarks = [
        "measure, place and verify of the second start: what stays is reading the files, one walk"
        " of the planner and the proof.",
    ]
    return report


def batches(rows: int, side: int) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 3, side, side), torch.randint(0, 10, (rows,))) for _ in range(2)]


def one(net: str, rows: int, side: int, folder: str | None) -> dict[str, Any]:
    """In a process of its own. `folder`: of the cache; None: plain Lightning."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    available()  # otherwise the first plan waits for the compiler
    torch.manual_seed(0)
    module = Task(getattr(torchvision.models, net)(num_classes=10), "SGD")
    strategy: Any = "auto"
    if folder is not None:
        strategy = OffloadStrategy(BUDGET, plan_cache=folder)
    watch, seen = Steps(), Seen()
    trainer = quiet_trainer(strategy, watch)
    data = DataLoader(batches(rows, side), batch_size=None)  # type: ignore[arg-type]
    with seen.watching_stages():
        trainer.fit(module, data)
    return {
        "steps": watch.seconds, "cpu": seen.cpu, "digest": digest(module, trainer.optimizers[0]),
        "known": folder is not None and strategy.plan.found.known,
    }  # fmt: skip


class Steps(L.Callback):
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._begun = process_time()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(process_time() - self._begun)
