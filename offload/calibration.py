"""A machine's rates, measured in a few seconds: what a plan is made with before anything ran.

    links    small and large copies, each way and both ways at once
    device   a matrix product by type, a kernel that only moves bytes, one that does nothing
    host     the optimizer's update, by more and more workers at once: they share the memory

`calibrate(device)` are the `Costs` for `plan(costs=)`; `rates(device)` the numbers behind them. On
a GPU copies are from pinned memory, and events on the streams tell the time. Without one ("cpu")
the same is done with the copies that a CPU's plan makes (memmove), by a clock.

Nobody else should use the machine meanwhile. Callers: trainers before they plan, benchmarks.
"""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier
from typing import TypeVar

import torch

from offload.costs import Costs
from offload.device_memory import measuring
from offload.rates import Rates, Sample, Samples, rates_of
from offload.stopwatch import Clock, Cpu, Device, Gpu, in_a_row

MIB = 1 << 20
SMALL = 4096
PARTS = 16
"""Things that are measured: each may take so much of the seconds."""
LEAST, MOST = 3, 50
"""Repeats of each."""
ROW = 32
"""Small things are timed so many in a row."""
WORKERS = (1, 2, 4, 8, 16, 32, 64)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is measured."""

    link: int = 64 * MIB
    memory: int = 256 * MIB
    gemm: Mapping[str, int] | None = None
    """Rows of a square matrix, by type."""
    update: int = 32 * MIB
    """Bytes of a parameter. With its gradient and its state it is a set of four such tensors."""
    sets: int = 8
    """At the least: as many as no cache holds, 1 GiB in all."""


ON_GPU = Sizes(gemm={"float32": 4096, "tf32": 8192, "bfloat16": 8192})
ON_CPU = Sizes(memory=64 * MIB, gemm={"float32": 768, "bfloat16": 512}, update=16 * MIB, sets=16)


def calibrate(
    device: str | torch.device, precision: str = "float32", seconds: float = 2.5
) -> Costs:
    """`plan(costs=calibrate("cuda"))`. `precision`: of the program's matrix products: float32,
    tf32, bfloat16."""
    return rates(device, seconds).costs(precision)


def rates(
    device: str | torch.device,
    seconds: float = 2.5,
    sizes: Sizes | None = None,
    workers: int | None = None,
) -> Rates:
    """All that is measured, within about so many seconds. `workers`: of the host at the most; all
    CPUs of this process but one, if not given: that one issues the kernels."""
    target = torch.device(device)
    if target.type == "cuda":
        bench: Device = Gpu(target)
        name = torch.cuda.get_device_name(target)
    elif target.type == "cpu":
        bench, name = Cpu(), "cpu"
    else:
        raise ValueError(f"device={device!r}: cuda or cpu is needed")
    sizes = sizes or (ON_GPU if target.type == "cuda" else ON_CPU)
    try:
        with torch.no_grad(), measuring("its rates", target):
            samples = measure(bench, sizes, seconds, workers or max(1, _cpus() - 1))
    finally:
        bench.close()
    return rates_of(samples, name, bench.notes)


def _cpus() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure(
    bench: Device, sizes: Sizes, seconds: float, workers: int, clock: Clock = time.perf_counter
) -> Samples:
    """`clock`: when a measurement has had its share of the time, and of the host's work."""
    again = functools.partial(_again, share=seconds / PARTS, clock=clock)
    host, there = bench.host_memory(sizes.link), _bytes(sizes.link, bench.device)
    host_too, there_too = bench.host_memory(sizes.link), _bytes(sizes.link, bench.device)
    into, out = bench.copy(there, host), bench.copy(host_too, there_too)
    both = again(lambda: bench.both(into, out, 2))
    return Samples(
        gemm={
            name: Sample(2.0 * rows**3, again(_product(bench, name, rows)))
            for name, rows in (sizes.gemm or {}).items()
        },
        memory=_memory(bench, sizes.memory, again),
        launch=Sample(ROW, again(_launches(bench))),
        h2d=_pair(bench, there, host, again),
        d2h=_pair(bench, host, there, again),
        both=(
            Sample(sizes.link, [one for one, _ in both]),
            Sample(sizes.link, [one for _, one in both]),
        ),
        d2d=_within(bench, there, there_too, again),
        host=_updates(sizes, workers, again, clock),
    )


def _again(run: Callable[[], T], share: float, clock: Clock) -> list[T]:
    """The first run fills caches and does not count."""
    run()
    end = clock() + share
    found: list[T] = []
    while len(found) < LEAST or (len(found) < MOST and clock() < end):
        found.append(run())
    return found


Again = Callable[[Callable[[], float]], list[float]]


def _bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device=device)


def _product(bench: Device, name: str, rows: int) -> Callable[[], float]:
    kind = torch.bfloat16 if name == "bfloat16" else torch.float32
    # Of ones a GPU draws less power, and is faster than it ever is on real numbers.
    draws = torch.Generator(bench.device).manual_seed(0)
    a, b, to = (
        torch.randn(rows, rows, dtype=kind, device=bench.device, generator=draws) for _ in range(3)
    )
    product = functools.partial(torch.mm, a, b, out=to)

    def timed() -> float:
        if bench.device.type != "cuda":
            return bench.timed(product)
        with _tf32(name == "tf32"):
            return bench.timed(product)

    return timed


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """By the one setting that can be read whatever the user has set, and written back as it was:
    `allow_tf32` raises where the others are in use, and writes "ieee" where nothing was set."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _memory(bench: Device, nbytes: int, again: Again) -> Sample:
    a, b, to = (torch.ones(nbytes // 4, device=bench.device) for _ in range(3))
    add = functools.partial(torch.add, a, b, out=to)
    return Sample(3.0 * nbytes, again(lambda: bench.timed(add)))


def _launches(bench: Device) -> Callable[[], float]:
    one = torch.zeros(1, device=bench.device)
    return lambda: bench.timed(functools.partial(in_a_row, functools.partial(one.add_, 1), ROW))


def _pair(
    bench: Device, to: torch.Tensor, source: torch.Tensor, again: Again
) -> tuple[Sample, Sample]:
    small = bench.copy(to[:SMALL], source[:SMALL])
    large = bench.copy(to, source)
    row = again(lambda: bench.timed(functools.partial(in_a_row, small, ROW)))
    return (
        Sample(SMALL, [one / ROW for one in row]),
        Sample(to.numel(), again(lambda: bench.timed(large))),
    )


def _within(bench: Device, to: torch.Tensor, source: torch.Tensor, again: Again) -> Sample:
    """Of one device's memory: the most that a copy to another one may do, and more than a link
    between two does. The other one is not asked: who uses it once keeps memory there until the
    process ends, and it may be somebody else's."""
    copy = functools.partial(to.copy_, source, non_blocking=True)
    return Sample(to.numel(), again(lambda: bench.timed(copy)))


def _updates(sizes: Sizes, workers: int, again: Again, clock: Clock) -> dict[int, Sample]:
    """A worker is a thread that calls the kernel, as an engine's is: torch's own threads share the
    work of every call, for each worker a team of its own. All work at the same time, each on a set
    that nobody has touched since all others were: in a step, too, an update finds nothing in the
    cache."""
    counts = [count for count in WORKERS if count < workers] + [workers]
    sets = [
        [torch.zeros(sizes.update // 4) for _ in range(4)] for _ in range(max(workers, sizes.sets))
    ]
    turns = itertools.cycle(sets)
    found: dict[int, Sample] = {}
    with ThreadPoolExecutor(workers, "calibrate-host") as pool:
        for count in counts:
            once = functools.partial(_at_once, pool, turns, count, clock)
            found[count] = Sample(7.0 * sizes.update * count, again(once))
    return found


def _at_once(
    pool: ThreadPoolExecutor, turns: Iterator[Sequence[torch.Tensor]], count: int, clock: Clock
) -> float:
    start = Barrier(count + 1)

    def work(tensors: Sequence[torch.Tensor]) -> None:
        start.wait()
        _update(*tensors)

    running = [pool.submit(work, tensors) for tensors in itertools.islice(turns, count)]
    start.wait()
    begin = clock()
    for future in running:
        future.result()
    return clock() - begin


def _update(p: torch.Tensor, g: torch.Tensor, average: torch.Tensor, squares: torch.Tensor) -> None:
    torch.ops.aten._fused_adamw_.default(
        [p], [g], [average], [squares], [], [torch.ones(())], lr=0.0, beta1=0.9, beta2=0.999,
        weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
    )  # fmt: skip
