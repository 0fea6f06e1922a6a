"""What it takes to move a training to another plan, and whether a step is lost on the way.

    ours    steps go on by a plan of another budget, or on another device of the same kind
    copies  copy_ of as many bytes, tensor by tensor, to memory that is new
    in use  the same to memory that was written before

ViT-B/16 goes back and forth between two plans; 100 moves are compared with as many steps of eager.
On the CPU two stages stand for two devices, and both are ordinary memory.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torchvision
from torch import nn

import offload
from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.offloading.live_steps import SETTLED, LiveSteps, training_step
from offload.planning.refusal import smallest_budget
from offload.program.kernels import CPU
from offload.running.runner import Runner
from offload.running.stage import Stage

MIB = 2**20
MOST = 1.2
"""Times the seconds of the copies."""
COPIES: Mapping[str, str] = MappingProxyType({"copies": "new memory", "in use": "memory in use"})
MOVES = 100


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    report = Report(
        "migration",
        f"Claim: a move between like plans takes at most {MOST} times as long as its copies, and"
        " loses no step",
        {"repeats": repeats, "time": "wall seconds, median [min, max]"},
    )
    name = "a small net" if smoke else "ViT-B/16"
    row = run_in_fresh_process(back_and_forth, smoke, repeats)
    report.rows.append({"case": name} | row)
    lines = [[name, f"{row['weights'] / MIB:.1f}", *_cells(row)]]
    for copies, where in COPIES.items():
        over = statistics.median(a / b for a, b in zip(row["ours"], row[copies], strict=True))
        report.asked.append(Target(f"seconds over those of copies to {where}", MOST, over))
    count = 4 if smoke else MOVES
    lost = run_in_fresh_process(differing_steps, count)
    report.rows.append({"case": f"{count} moves", "differing": lost})
    report.asked.append(Target(f"steps lost or made twice in {count} moves", 0, lost))
    head = ["model", "weights MiB", "moved MiB", "ours ms", "copies ms", "in use ms"]
    report.tables["A move"] = format_table(head, lines)
    report.remarks = [
        "The arena of the new plan is taken within `ours`, and its pages are touched there for the"
        " first time, as those of `copies` are. On a device memory has no first time.",
        "Planning is not within: it is done ahead.",
    ]
    return report


def _cells(found: Mapping[str, Any]) -> list[str]:
    """The MiB of a move, and its milliseconds beside those of the copies."""
    seconds = (format_spread([1e3 * s for s in found[key]]) for key in ("ours", *COPIES))
    return [f"{statistics.median(found['bytes']) / MIB:.1f}", *seconds]


class Job:
    """A training step of a model, and its plans."""

    def __init__(self, model: nn.Module, *batch: torch.Tensor) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        self.step = training_step(model, nn.functional.cross_entropy, self.optimizer)

    @contextmanager
    def stepping(self, stage: Stage | None = None) -> Iterator[LiveSteps]:
        """Its steps, with all states there and everything on the device."""
        run_by = partial(Runner, stage=stage)
        with LiveSteps(self.step, offload.plan, self.model, self.optimizer, run_by=run_by) as steps:
            steps.settle(*self.batch)
            yield steps


def part_of(whole: offload.Plan, part: float) -> offload.Plan:
    """A plan with this part of the way from the smallest budget to the one without offloading."""
    least, _ = smallest_budget(whole.source, 0)
    least += whole.reserve
    most = max(least, whole.device_bytes)
    return offload.plan(whole.source, least + int(part * (most - least)) + MIB)


def _small() -> Job:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return Job(nn.Sequential(*layers), torch.randn(4, 256), torch.zeros(4, dtype=torch.long))


def _vit() -> Job:
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16(num_classes=10)
    return Job(model, torch.randn(1, 3, 224, 224), torch.zeros(1, dtype=torch.long))


def copied(sizes: Sequence[int], nbytes: int) -> tuple[float, float]:
    """Seconds of copying tensors of these sizes, as many bytes of them, to memory that is new, and
    to the same memory again."""
    sources: list[torch.Tensor] = []
    left = nbytes
    while left > 0:
        for size in sizes:
            if left > 0:
                take = min(left, size)
                sources.append(torch.ones(take, dtype=torch.uint8))
                left -= take
    begin = time.perf_counter()
    target = torch.empty(nbytes, dtype=torch.uint8)
    _copy(sources, target)
    between = time.perf_counter()
    _copy(sources, target)
    return between - begin, time.perf_counter() - between


def _copy(sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    at = 0
    for source in sources:
        target[at : at + source.nbytes].copy_(source)
        at += source.nbytes


def _moves(job: Job, steps: LiveSteps, moves: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"ours": [], "copies": [], "in use": [], "bytes": [], "ways": []}
    tensors = [*job.model.parameters()]
    found["weights"] = sum(tensor.nbytes for tensor in tensors)
    for move in moves:
        steps(*job.batch)
        gc.collect()
        moved = move()
        found["ours"].append(moved.seconds)
        found["bytes"].append(moved.nbytes)
        found["ways"].append(moved.way)
        with steps.suspended():
            took = copied([tensor.nbytes for tensor in tensors], moved.nbytes)
        for copies, seconds in zip(COPIES, took, strict=True):
            found[copies].append(seconds)
    return found


def back_and_forth(smoke: bool, repeats: int) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    job = _small() if smoke else _vit()
    with job.stepping() as steps:
        plans = [part_of(steps.plan, part) for part in (0.3, 0.7)]
        steps.move_to(plans[0])
        ways = [partial(steps.move_to, plans[(n + 1) % 2]) for n in range(2 * repeats)]
        return _moves(job, steps, ways)


def differing_steps(count: int) -> int:
    """How many of `count` steps, each after a move, come to another loss than eager's; and one more
    if the weights differ at the end."""
    torch.set_num_threads(1)
    eager, moves = _small(), _small()
    for _ in range(SETTLED):
        eager.step(*eager.batch)
    differing = 0
    with (
        Stage(CPU, "threads") as near,
        Stage(CPU, "threads") as far,
        moves.stepping(near) as steps,
    ):
        plans = [part_of(steps.plan, part) for part in (0.1, 0.5, 1.0)]
        for n in range(count):
            steps.move_to(plans[n % len(plans)], (near, far, None)[n % 3])
            with steps.suspended():
                expected = eager.step(*eager.batch)
            differing += not torch.equal(expected, steps(*moves.batch))
    weights = zip(eager.model.parameters(), moves.model.parameters(), strict=True)
    return differing + (not all(torch.equal(a, b) for a, b in weights))
