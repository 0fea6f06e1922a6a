"""Part g: the loader beside a step on the device. Who crops, where pictures lie, what is copied.

    alone       batches are taken as fast as they come, to the last copy's end
    with step   ResNet-18 trains on them: pictures/s, beside the same step on a batch that is there

    pictures lie   in the loader's slab | page-locked, gathered by the device | on the device
    augmented      on the CPU | on the device         copied   one ahead | in the loop

The last two places are no features of the loader: they say what one would bring (sources.py).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from offloading.report import Report, table
from peers.usage import Meter
from torch.nn import functional

from gpu.loading_setting import Setting, setting
from gpu.loading_sources import SOURCES, Source
from gpu.part import Found, Job, Outcome, Row, Rows, Step
from gpu.picture import Panel
from gpu.timing import synchronize

NAME = "loading"
CLAIM = "The loader on the device: who augments, where pictures lie, and what a step waits for"
CEILING = "ceiling: the step alone"
DATA = ("cifar10", "photos")
PASSES = 3


def steps(smoke: bool) -> Sequence[Step]:
    found: list[Step] = []
    for data in DATA:
        names = [name for name, source in SOURCES.items() if data in source.data]
        cells = tuple(f"{data}; {name}" for name in (CEILING, *names))
        if smoke:
            found.append(Step("gpu.loading:rows", cells))
            continue
        # A process each: threads, page-locked memory and pipelines of one are not the next one's.
        found += [Step("gpu.loading:rows", (cell,), minutes=0.8) for cell in cells]
    return found


@dataclass(slots=True)
class Trained:
    """ResNet-18 in bfloat16, channels last, SGD: the step that waits for pictures."""

    net: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device: str

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> None:
        images = pictures.to(dtype=torch.float32, memory_format=torch.channels_last)
        images = (images - 127.5) / 63.75
        with torch.autocast(self.device, torch.bfloat16):
            loss = functional.cross_entropy(self.net(images), labels.long() % 10)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def trained(where: Setting) -> Trained:
    torch.manual_seed(0)
    net = net_for(where).to(where.device).to(memory_format=torch.channels_last)
    return Trained(net, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), where.device)


def net_for(where: Setting) -> torch.nn.Module:
    """ResNet-18: for pictures of 32 pixels with a stem of 3 x 3, which 224 would be absurd for."""
    if where.device == "cpu":  # a smoke run: what is tried is the loader
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 7, 4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(8, 10),
        )  # fmt: skip
    if where.data == "cifar10":
        from accuracy.nets import build_net  # needs lightning: then the rows of CIFAR-10 say so

        return build_net("resnet18")
    import torchvision  # a machine may have none: then the rows of photos say so

    return torchvision.models.resnet18(num_classes=10)


def rows(job: Job) -> Rows:
    for cell in job.cells:
        data, name = cell.split("; ")
        where = setting(data, job)
        if name == CEILING:
            yield cell, _ceiling(where)
            continue
        source = SOURCES[name]
        if why := source.refused(where):
            yield cell, {"problem": why}
            continue
        yield cell, _row(source, where)


def _ceiling(where: Setting) -> Row:
    """The device never waits: one batch, again and again."""
    shape = (where.batch, 3, where.side, where.side)
    pictures = torch.randint(0, 256, shape, dtype=torch.uint8, device=where.device)
    labels = torch.zeros(where.batch, dtype=torch.long, device=where.device)
    step = trained(where).step
    count = max(2, min(50, where.pictures // where.batch))

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(count):
            yield pictures, labels

    seen = _passes(batches, step, where)
    return {"alone": None, "with_step": statistics.median(p["rate"] for p in seen),
            "cpu_ms": statistics.median(p["cpu_ms"] for p in seen)}  # fmt: skip


def _row(source: Source, where: Setting) -> Row:
    step = trained(where).step
    with source.open(where) as batches:
        check(next(iter(batches())), where)
        taken = _passes(batches, _nothing, where)
        stepped = _passes(batches, step, where)
    middle = partial(_middle, taken)
    return {
        "alone": middle("rate"), "cpu_ms": middle("cpu_ms"),
        "with_step": _middle(stepped, "rate"), "values": [p["rate"] for p in stepped],
        "pictures": where.named,
    }  # fmt: skip


def _middle(passes: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in passes)


def check(batch: Any, where: Setting) -> None:
    """It serves what was asked for: a fast loader of something else proves nothing."""
    pictures = batch[0]
    if tuple(pictures.shape[1:]) != (3, where.side, where.side):
        raise ValueError(f"pictures of {tuple(pictures.shape)}, not of {where.side} pixels")
    if pictures.device.type != where.device or pictures.dtype != torch.uint8:
        raise ValueError(f"pictures are {pictures.dtype} on {pictures.device}")
    if int(pictures.max()) == int(pictures.min()):
        raise ValueError("pictures of one colour")


def _nothing(pictures: torch.Tensor, labels: torch.Tensor) -> None:
    pass


def _passes(
    batches: Callable[[], Iterator[Any]],
    step: Callable[[torch.Tensor, torch.Tensor], None],
    where: Setting,
) -> list[dict[str, float]]:
    """After one to warm up."""
    return [_pass(batches, step, where) for _ in range(PASSES + 1)][1:]


def _pass(
    batches: Callable[[], Iterator[Any]],
    step: Callable[[torch.Tensor, torch.Tensor], None],
    where: Setting,
) -> dict[str, float]:
    """Pictures a second, and CPU milliseconds of all processes for 1000 of them."""
    meter, served = Meter(), 0
    synchronize(where.device)
    cpu, begin = meter.cpu(), time.perf_counter()
    for pictures, labels in batches():
        step(pictures, labels)
        served += len(pictures)
    synchronize(where.device)
    seconds = time.perf_counter() - begin
    return {"rate": served / seconds, "cpu_ms": 1e6 * (meter.cpu() - cpu) / served}


def report(found: Found) -> Outcome:
    said = Report(NAME, CLAIM, {"passes": PASSES, "net": "ResNet-18, bfloat16"})
    panels: list[Panel] = []
    for data in DATA:
        ceiling = found.number(f"{data}; {CEILING}", "with_step")
        lines: list[list[str]] = []
        bars: dict[str, float] = {}
        for name in (CEILING, *SOURCES):
            row = found.rows.get(f"{data}; {name}")
            if row is None:
                continue
            alone, with_step = row["alone"], row["with_step"]
            bars[name] = with_step
            lines.append([
                name, "" if alone is None else f"{alone:,.0f}", f"{with_step:,.0f}",
                f"{with_step / ceiling:.0%}" if ceiling else "", f"{row['cpu_ms']:.1f}",
            ])  # fmt: skip
        head = ["", "alone, pictures/s", "with the step", "of the ceiling", "CPU ms of 1000"]
        said.tables[data] = table(head, lines)
        panels.append(Panel(f"{data}, with the step", "pictures/s", bars, limit=ceiling))
    said.tables["Who they are"] = table(
        ["", "how"], [[name, source.note] for name, source in SOURCES.items()]
    )
    said.remarks = [
        "CPU ms: of this process and its workers, alone; the ceiling's is the step's own.",
        "CIFAR-10 is drawn here: a loader does not look at pixels. Photos: those of --data"
        " DIR/photos/CLASS/*.jpg, else drawn, 500 x 375 (smooth, so their JPEGs are smaller).",
        "A row with reuse 3 decodes a third as often: the pictures that it serves count.",
    ]
    return Outcome(said, panels)
