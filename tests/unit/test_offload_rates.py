"""From samples to costs, by numbers worked out by hand; and calibrating by a fake clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.graph.rates import Sample, Samples, costs_of, fit_copies
from offload.measuring.calibration import (
    ON_CPU,
    ON_GPU,
    Sizes,
    beyond_caches,
    cache_bytes,
    measure_rates,
)
from offload.measuring.stopwatch import DeviceRun, Run

KIB = 1 << 10


def samples() -> Samples:
    """A copy takes 2 s and 1 s for 100 bytes; side by side 1.25 times as long."""
    return Samples(
        gemm={"float32": Sample(100, [1, 2, 50]), "bfloat16": Sample(100, [1])},
        memory=Sample(300, [3]),
        launch=Sample(10, [5]),
        h2d=(Sample(100, [3]), Sample(1000, [12])),
        d2h=(Sample(100, [3]), Sample(1000, [12])),
        both=(Sample(1000, [12.5]), Sample(1000, [12.5])),
        d2d=Sample(100, [2]),
        host={1: Sample(100, [10]), 2: Sample(200, [10]), 4: Sample(400, [19.5])},
    )


def test_a_copy_has_a_part_that_grows_with_its_bytes_and_one_that_does_not() -> None:
    assert fit_copies(Sample(100, [3, 3, 90]), Sample(1000, [12])) == (100, 2)


def test_costs_are_of_the_median_repeat_and_of_the_programs_precision() -> None:
    costs = costs_of(samples())
    assert (costs.flops, costs.memory, costs.launch, costs.d2d) == (50, 100, 0.5, 50)
    assert (costs.h2d, costs.d2h, costs.copy) == (100, 100, 2)
    assert costs_of(samples(), "bfloat16").flops == 100


def test_a_precision_that_was_not_measured_is_an_error_that_names_those_that_were() -> None:
    with pytest.raises(ValueError, match=r"'int8' was not measured; choose float32, bfloat16"):
        costs_of(samples(), "int8")


def test_directions_that_slow_each_other_down_share_the_link() -> None:
    assert costs_of(samples()).shared == pytest.approx(0.8)
    faster = replace(samples(), both=(Sample(1000, [5]), Sample(1000, [5])))
    assert costs_of(faster).shared == 1.0


def test_as_many_host_workers_are_reckoned_with_as_the_memory_feeds() -> None:
    # Two bring 20 a second, four together 20.5: two more would wait for the memory.
    costs = costs_of(samples())
    assert (costs.host_workers, costs.host_memory) == (2, 10)


class Fake:
    """A device whose clock is the work that it was given: bytes of copies, kernels as one."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now = 0.0
        self.copied = 0

    def clock(self) -> float:
        self.now += 0.125  # looking at it takes time: so every loop ends
        return self.now

    def time_once(self, run: Run) -> float:
        self.copied = 0
        run()
        return 2.0 * self.copied or 1.0

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        assert to.numel() == source.numel()

        def run() -> None:
            self.copied += to.numel() + 10

        return run

    def time_at_once(self, copies: Sequence[DeviceRun], times: int) -> Sequence[float]:
        return [4.0 * self.time_once(run) for _, run in copies]

    def close(self) -> None: ...


def test_what_is_measured_is_what_the_clock_says() -> None:
    fake = Fake()
    sizes = Sizes(link=64 * KIB, memory=4 * KIB, gemm={"float32": 8}, update=4 * KIB)
    found = measure_rates(fake, sizes, 16.0, 3, fake.clock)
    costs = costs_of(found)
    assert (costs.h2d, costs.d2h, costs.copy) == (0.5, 0.5, 20)
    assert costs.shared == pytest.approx(0.25, rel=1e-3)
    assert (costs.flops, costs.memory) == (2 * 8**3, 3 * 4 * KIB)
    assert costs.launch == 1 / 32
    assert sorted(found.host) == [1, 2, 3]


GIB = 1 << 30


@pytest.mark.parametrize("sizes", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("cache", [0, 32 << 20, 105 << 20, 260 << 20, 1152 << 20])
def test_updates_are_measured_in_more_memory_than_the_caches_hold(sizes: Sizes, cache: int) -> None:
    found = beyond_caches(sizes, cache, 128 * GIB)
    taken = 4 * found.update * found.sets
    assert GIB <= taken <= 4 * GIB
    assert taken > 15 * cache or taken == 4 * GIB
    assert 4 * sizes.update * beyond_caches(sizes, cache, 2 * GIB).sets == GIB


def test_the_caches_of_the_highest_level_are_added_up_and_each_counts_once(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path) == 0
    for cpu in range(4):
        for level, size, shared in ((2, "1024K", f"{cpu}"), (3, "32768K", f"{cpu // 2}")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n", encoding="ascii")
    assert cache_bytes(tmp_path) == 2 * 32768 * KIB
