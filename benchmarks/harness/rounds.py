"""Rounds: what is compared runs in turns, in another order each round.

Rounds differ in load, the runs of one round do not. So a ratio is taken within a round, and of the
ratios the median.
"""

import random
from collections.abc import Iterable, Iterator


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
