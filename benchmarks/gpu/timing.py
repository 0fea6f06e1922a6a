"""How long things take: on a GPU a call returns before its kernels have run, so both ends wait.

What is compared goes in rounds, one after the other, in another order each: rounds differ, what is
in one round does not.
"""

import gc
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.harness.rounds import shuffle_rounds

Call = Callable[[], object]
WARM_UP, REPEATS = 3, 5


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """What nobody holds goes back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def timed(call: Call, device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def rounds(
    calls: Mapping[str, Call], device: str, repeats: int = REPEATS, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Seconds of each, round by round."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for number, order in shuffle_rounds(calls, repeats, warm_up):
        for name in order:
            took = timed(calls[name], device)
            if number >= 0:
                seen[name].append(took)
    return seen


def often(call: Call, times: int) -> Call:
    """A sample long enough to be timed."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def each(seconds: list[float], times: int) -> list[float]:
    return [took / times for took in seconds]
