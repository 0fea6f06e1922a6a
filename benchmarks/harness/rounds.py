"""Rounds: what is compared runs in turns, in another order each round.

Rounds differ in load, the runs of one round do not. So a ratio is taken within a round, and of the
ratios the median.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.harness.process import time_call


def shuffle_rounds(
    names: Iterable[str], rounds: int, warm_up: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """Each round's number and its order. Rounds below 0 warm up."""
    every = list(names)
    for number in range(-warm_up, rounds):
        yield number, random.Random(number).sample(every, len(every))


def alternate_rounds(names: Iterable[str], rounds: int) -> Iterator[tuple[int, list[str]]]:
    """Each round's number and its order: forwards, backwards, forwards, ..."""
    every = list(names)
    for number in range(rounds):
        yield number, every[:: -1 if number % 2 else 1]


def time_rounds(
    calls: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, list[float]]]:
    """CPU and wall seconds of each call, round by round."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in calls}
    for number, order in shuffle_rounds(calls, rounds, warm_up):
        for name in order:
            cpu, wall, _ = time_call(calls[name])
            if number >= 0:
                seconds[name]["cpu"].append(cpu)
                seconds[name]["wall"].append(wall)
    return seconds
