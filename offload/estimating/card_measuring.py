"""Makes the card file of this machine in a minute: what a card's classes of work reach here.

    sample steps  --captured, measured-->  (class, size, seconds) of every kernel  -->  curves
    check steps   --priced by the curves-->  predicted    --run eagerly-->  measured

Nothing else should use the machine meanwhile.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offload.estimating.card import Card
from offload.estimating.operator_class import Work, work_of
from offload.estimating.pricing import price_tasks
from offload.graph.rates import costs_of
from offload.graph.taskgraph import Task
from offload.live.function_capture import capture_kernels
from offload.measuring.calibration import cache_bytes, take_samples
from offload.measuring.profiling import measure_tasks
from offload.measuring.stopwatch import Cpu, Gpu, TimedDevice
from offload.memory.host_memory import memory_left
from offload.torch_seams import fused_adamw_op

Step = Callable[[torch.Tensor], Any]
GROWTH = 4.0
"""Calls whose sizes differ by less than this are one point of a curve."""
RUNS = 9
"""How often a step is run, after two that do not count."""
GAP = 2e-6
"""Seconds between kernels that are queued on a GPU, as an H200 showed."""
LEAST_PART = 0.2
"""The least share of a call's seconds that is its work rather than its gap."""


class Attention(nn.Module):
    """Attends within each sample, by `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FirstResult(nn.Module):
    """An LSTM that returns its outputs only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def measure_card(device: torch.device, name: str) -> Card:
    """Measure this machine."""
    samples = take_samples(device, 8.0)
    costs = costs_of(samples)
    scale = 1 if device.type == "cpu" else 4
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found: dict[str, list[tuple[Work, Task]]] = defaultdict(list)
    steps = [_training(module, x, device, dtype) for module, x in _sample_steps(scale)]
    for step, given in [*steps, (_update, torch.randn(scale << 22, device=device))]:
        for task in measure_tasks(capture_kernels(step, given)).tasks:
            if task.seconds:
                work = work_of(task.kernel.calls[0])
                found[work.kind].append((work, task))
    products = {kind: sample.rate for kind, sample in samples.gemm.items()}
    on_gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    memory = memory_left().nbytes
    peak = products[str(dtype).removeprefix("torch.")]
    flops = {kind: _curve(group, peak, costs.launch, True) for kind, group in found.items()}
    moving = {k: _curve(g, costs.memory, costs.launch, False) for k, g in found.items()}
    card = Card.model_validate({
        "name": name,
        "title": on_gpu.name if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "source": "measured",
        "where": {"products": "perfect-card measure, on this machine"},
        "device": device.type,
        "capability": f"{on_gpu.major}.{on_gpu.minor}" if on_gpu else "",
        "versions": {"torch": torch.__version__},
        "memory_bytes": on_gpu.total_memory if on_gpu else memory,
        "context_bytes": _context_bytes(device),
        "l2_bytes": on_gpu.L2_cache_size if on_gpu else cache_bytes(),
        "memory_rate": costs.memory,
        "launch_seconds": GAP if on_gpu else _seconds_of_a_call(),
        "products": products,
        "flops_shares": {kind: curve for kind, curve in flops.items() if curve},
        "bytes_shares": {k: c for k, c in moving.items() if c and not flops[k]},
        "links": {
            "h2d": costs.h2d, "d2h": costs.d2h, "d2d": costs.d2d, "shared": costs.shared,
            "copy_seconds": costs.copy,
        },
        "host": {
            "memory_bytes": memory, "memory_rate": costs.host_memory, "workers": costs.host_workers,
        },
        "workspaces": {"fixed": 0, "shares": _workspaces(found)},
        "checks": ({"name": "none yet", "predicted": 1.0, "measured": 1.0},),
    })  # fmt: skip
    checks = tuple(
        _check(card, label, module, x, device, dtype) for label, module, x in _checks(scale)
    )
    return Card.model_validate(card.model_dump() | {"checks": checks})


def _sample_steps(scale: int) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Modules with every class of work, at several sizes."""
    for n in (64, 256, 768):
        width = n * scale
        ends = nn.GELU(), nn.LayerNorm(width), nn.Softmax(-1), nn.Linear(width, 16)
        yield nn.Sequential(nn.Linear(width, width), *ends), torch.randn(width, width)
        yield nn.Linear(width, width + 1), torch.randn(width, width)
        yield Attention(width, n // 32), torch.randn(4, n // 2, width)
    for into, channels, rows in (
        (3, 16, 32),
        (16, 16, 32),
        (64, 64, 16),
        (64, 64, 56),
        (256, 256, 14),
    ):
        conv = nn.Conv2d(into, channels, 3, padding=1)
        parts = conv, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)
        yield nn.Sequential(*parts), torch.randn(4 * scale, into, rows, rows)
    for n in (64, 256):
        yield FirstResult(n * scale), torch.randn(8, 32, n * scale)


def _checks(scale: int) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Steps that none of the samples is."""
    width = 128 * scale
    mlp = chain.from_iterable((nn.Linear(4 * width, 4 * width), nn.ReLU()) for _ in range(3))
    yield "MLP", nn.Sequential(*mlp), torch.randn(64 * scale, 4 * width)
    block = nn.LayerNorm(width), Attention(width, 4), nn.Linear(width, 4 * width), nn.GELU()
    blocks = nn.Sequential(*block, nn.Linear(4 * width, width), nn.LayerNorm(width))
    yield "transformer", blocks, torch.randn(8, 128, width)
    convs = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    more = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()
    yield "convnet", nn.Sequential(*convs, *more), torch.randn(8 * scale, 3, 32, 32)


def _training(
    module: nn.Module, x: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[Step, torch.Tensor]:
    """A forward and a backward pass."""
    inside = module.to(device, dtype)
    weights = [*inside.parameters()]

    def step(x: torch.Tensor) -> Any:
        loss = inside(x).float().square().mean()
        return loss, *torch.autograd.grad(loss, weights)

    return step, x.to(device, dtype)


def _update(x: torch.Tensor) -> torch.Tensor:
    """One update by fused AdamW."""
    weight, gradient, mean, squares = (x.clone() for _ in range(4))
    fused_adamw_op(
        [weight], [gradient], [mean], [squares], [], [x[0].clone()], lr=0.0, beta1=0.9, beta2=0.999,
        weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    return weight


def _curve(
    group: Sequence[tuple[Work, Task]], peak: float, gap: float, by_flops: bool
) -> tuple[tuple[float, float], ...]:
    """Points of growing size: the median share of the peak among calls of about that size."""
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for work, task in group:
        amount = work.flops if by_flops else float(work.nbytes)
        if amount and task.seconds:
            seconds = max(task.seconds - gap, LEAST_PART * task.seconds)
            place = int(math.log(amount, GROWTH))
            points[place].append((amount, min(100.0, amount / seconds / peak)))
    middles = [[*map(median, zip(*points[place], strict=True))] for place in sorted(points)]
    return tuple((float(f"{size:.4g}"), float(f"{share:.4g}")) for size, share in middles)


def _workspaces(found: dict[str, list[tuple[Work, Task]]]) -> dict[str, float]:
    """By class: the largest share of a call's bytes that it took besides its results."""
    shares = {
        kind: max(task.workspace / max(1, work.copied) for work, task in group if work.nbytes > 1e5)
        for kind, group in found.items()
        if any(work.nbytes > 1e5 for work, _ in group)
    }
    return {kind: float(f"{share:.3g}") for kind, share in shares.items() if share > 0.001}


def _check(
    card: Card, name: str, module: nn.Module, x: torch.Tensor, device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    step, given = _training(module, x, device, dtype)
    priced = price_tasks(capture_kernels(step, given), card)
    timer = Gpu(device) if device.type == "cuda" else Cpu()
    predicted = sum(task.seconds or 0.0 for task in priced.tasks)
    return {"name": name, "predicted": predicted, "measured": _typical(timer, step, given)}


def _typical(timer: TimedDevice, step: Step, given: torch.Tensor) -> float:
    return median([timer.time_once(lambda: step(given)) for _ in range(RUNS + 2)][2:])


def _seconds_of_a_call() -> float:
    """Of the host's time in an eager step of tiny tensors: all of it is the calls' own."""
    module = nn.Sequential(*chain.from_iterable((nn.Linear(4, 4), nn.GELU()) for _ in range(8)))
    step, given = _training(module, torch.randn(4, 4), torch.device("cpu"), torch.float32)
    # The least: threads that wait for each other on a busy machine take a thousand times as long.
    least = min(Cpu().time_once(lambda: step(given)) for _ in range(10 * RUNS))
    return least / len(capture_kernels(step, given).tasks)


def _context_bytes(device: torch.device) -> int:
    """What the driver shows as taken besides what torch has asked for."""
    if device.type == "cpu":
        return 0
    free, whole = torch.cuda.mem_get_info(device)
    return max(0, whole - free - torch.cuda.memory_reserved(device))
