"""Two jobs take turns on a device, and each has a loader that decodes JPEG pictures.

alone     each job in a fleet of its own, one after the other
stop      a loader whose job waits for its turn begins nothing
go on     it decodes as if its job had the device, until its buffer is full
give way  it decodes where the workers of the other loader leave room (what a fleet does)

A step waits a fixed time, as the host waits for a device, so both cores are left for decoding.
Torch has one thread, because its teams spin for a while after each operation. The jobs either both
wait for their pictures, or one for its pictures and the other for its device.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch import nn

from benchmarks.fleet.devices import QUIET, FromPlanned
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.harness.rounds import alternate_rounds
from benchmarks.sharing.photos import pictures
from loaders import ReuseLoader
from loaders.augment import Chain, Flip, RandomResizedCrop
from loaders.workers import precedence
from trainers.fleet import Fleet

WORKERS = 2
BATCH = 50
QUANTUM = 8
STEPS = 120
RULES: Mapping[str, Callable[[bool, int, int], bool]] = MappingProxyType({
    "stop": lambda *asked: not asked[0],
    "go on": lambda *_: True,
    "give way": precedence.may_begin,
})  # fmt: skip
CASES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"both decode": (0.005, 0.005), "one decodes": (0.005, 0.08)}
)
"""The device's seconds in a step of each job. A batch takes about 0.02 s of both cores."""


class Looks(L.LightningModule):
    """A net of a few weights that depend on all pictures."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seconds = seconds
        self.stalled = 0.0
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.net(batch[0][:, :, ::8, ::8].float().mean((2, 3)) / 255).square().mean()

    def on_train_end(self) -> None:
        loader: Any = self.trainer.train_dataloader
        self.stalled = loader.stats.stall_seconds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a fleet of some jobs took."""

    wall: float
    cpu: float
    stalls: Sequence[float]
    """Seconds that each job waited for its loader."""
    weights: Sequence[torch.Tensor]


def train(folder: Path, jobs: Mapping[int, float], smoke: bool) -> Trained:
    """Train jobs in a fleet: by number, which is their loader's seed, the seconds of a step."""
    crop = Chain([RandomResizedCrop(32 if smoke else 224), Flip()])
    options = {"batch_size": 4 if smoke else BATCH, "workers": WORKERS, "reuse": 1, "augment": crop}
    trainer = {**QUIET, "max_epochs": -1, "max_steps": 12 if smoke else STEPS}
    loaders = [ReuseLoader(str(folder), seed=number, **options) for number in jobs]
    modules = [Looks(seconds) for seconds in jobs.values()]
    watch = FromPlanned(len(jobs))
    with tempfile.TemporaryDirectory() as results:
        fleet = Fleet(None, "cpu", folder=results, watch=watch, quantum=2 if smoke else QUANTUM)
        for number, loader, module in zip(jobs, loaders, modules, strict=True):
            fleet.add(f"job{number}", module, train=loader, trainer=trainer, offload=False, seed=0)
        result = fleet.fit()
    assert all(job.state == "finished" for job in result.jobs.values()), result.table()
    for loader in loaders:
        loader.close()
    weights = [p.detach().clone() for module in modules for p in module.parameters()]
    return Trained(watch.wall, watch.cpu, [module.stalled for module in modules], weights)


def alone(folder: Path, jobs: Mapping[int, float], smoke: bool) -> Trained:
    """Train the same jobs, each in a fleet of its own."""
    each = [train(folder, {number: seconds}, smoke) for number, seconds in jobs.items()]
    return Trained(
        sum(one.wall for one in each), sum(one.cpu for one in each),
        [one.stalls[0] for one in each], [weight for one in each for weight in one.weights],
    )  # fmt: skip


def in_turns(folder: Path, jobs: Mapping[int, float], smoke: bool, rule: str) -> Trained:
    """Train the jobs in one fleet, whose loaders follow this rule."""
    kept, precedence.may_begin = precedence.may_begin, RULES[rule]
    try:
        return train(folder, jobs, smoke)
    finally:
        precedence.may_begin = kept


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    report = Report(
        "parked_loaders",
        "loaders of jobs that wait go on decoding, and take nothing from the one that trains",
        {"pictures a batch": BATCH, "workers": WORKERS, "steps": STEPS, "quantum": QUANTUM},
    )
    with tempfile.TemporaryDirectory() as place, one_thread():
        folder, are_photos = pictures(Path(place), smoke)
        report.setting["photos"] = are_photos
        train(folder, {0: 0.0}, smoke)  # what is loaded and compiled once is nobody's
        for case, seconds in CASES.items():
            _one_case(report, case, folder, dict(enumerate(seconds)), smoke, repeats)
    wrong = sum(row["wrong"] for row in report.rows)
    report.asked.append(Target("tensors with other bits than alone", 0, wrong))
    report.remarks.append(
        "Seconds are from the moment when both jobs are ready to train. A job waits for its"
        " pictures within its turns only."
    )
    return report


def _one_case(
    report: Report, case: str, folder: Path, jobs: Mapping[int, float], smoke: bool, repeats: int
) -> None:
    ways: dict[str, Callable[[], Trained]] = {"alone": lambda: alone(folder, jobs, smoke)}
    for rule in RULES:
        ways[rule] = lambda rule=rule: in_turns(folder, jobs, smoke, rule)
    rows: dict[str, list[Trained]] = {way: [] for way in ways}
    for number, order in alternate_rounds(ways, repeats):
        for way in order:
            rows[way].append(ways[way]())
        right = rows["alone"][-1].weights
        for way, found in rows.items():
            one = found[-1]
            wrong = sum(not torch.equal(a, b) for a, b in zip(one.weights, right, strict=True))
            report.rows.append({
                "case": case, "round": number, "way": way, "wall": one.wall, "cpu": one.cpu,
                "stalls": [*one.stalls], "wrong": wrong,
            })  # fmt: skip
    lines = []
    for way, found in rows.items():
        waits = (format_spread([one.stalls[number] for one in found]) for number in jobs)
        walls, cpus = [one.wall for one in found], [one.cpu for one in found]
        lines.append([way, format_spread(walls), format_spread(cpus), *waits])
    steps = " and ".join(f"{1e3 * seconds:g}" for seconds in jobs.values())
    head = ["way", "wall s", "CPU s", *(f"job {number} waits s" for number in jobs)]
    report.tables[f"{case}: the device takes {steps} ms of a step"] = format_table(head, lines)
    walls = {way: [one.wall for one in found] for way, found in rows.items()}
    for other, most in (("stop", 1.0), ("go on", 1.02)):
        over = [a / b for a, b in zip(walls["give way"], walls[other], strict=True)]
        report.asked.append(
            Target(f"{case}: give way over {other}, wall", most, statistics.median(over))
        )
