"""The order of one pass: the loader's own reuse buffer, and orders that other papers have.

    immediate, block, rolling   loaders.order.reuse
    in-batch   all serves of a sample stand side by side in one batch (repeated augmentation)
    echoed     each sample R times in the stream, then a shuffle buffer of single serves: one is
               drawn at random, and the next of the stream takes its place (example echoing)

Serves are numbered as they come: 0 is a sample's first, the one that decodes it.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from loaders.order.reuse import Mode, ReuseBuffer
from loaders.order.serve import Serve

Order = Mode | Literal["in-batch", "echoed"]


def plan_pass(
    order: Order, samples: int, batch_size: int, reuse: int, buffer: int, seed: tuple[int, ...]
) -> Iterator[Serve]:
    """Full batches only; `buffer` counts batches."""
    if reuse == 1:
        # Every order is then the source's own shuffled one.
        order, buffer = "immediate", 1
    if order == "in-batch":
        return _in_batch(samples, batch_size, reuse)
    if order == "echoed":
        return _echoed(samples, batch_size, reuse, buffer * batch_size, seed)
    return iter(
        ReuseBuffer(
            samples=samples, batch_size=batch_size, reuse=reuse, buffer_batches=buffer,
            mode=order, shuffle=True, drop_last=True, seed=seed,
        )
    )  # fmt: skip


def counted_as(order: Order) -> Mode:
    """The order of the loader that has as many batches a pass."""
    return "block" if order in ("in-batch", "echoed") else order


def _in_batch(samples: int, batch_size: int, reuse: int) -> Iterator[Serve]:
    positions = np.repeat(np.arange(samples), reuse)
    return _batches(positions, batch_size)


def _echoed(
    samples: int, batch_size: int, reuse: int, slots: int, seed: tuple[int, ...]
) -> Iterator[Serve]:
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    stream = np.repeat(np.arange(samples), reuse)
    held, served = stream[:slots].copy(), np.empty_like(stream)
    drawn = rng.integers(len(held), size=len(stream) - len(held))
    for number, slot in enumerate(drawn.tolist()):
        served[number] = held[slot]
        held[slot] = stream[len(held) + number]
    served[len(drawn) :] = rng.permutation(held)
    return _batches(served, batch_size)


def _batches(positions: np.ndarray, batch_size: int) -> Iterator[Serve]:
    serves = np.empty_like(positions)
    seen = np.zeros(int(positions.max()) + 1, dtype=np.int64)
    for at, position in enumerate(positions.tolist()):
        serves[at] = seen[position]
        seen[position] += 1
    for first in range(0, len(positions) - batch_size + 1, batch_size):
        chosen = slice(first, first + batch_size)
        yield Serve(positions[chosen], serves[chosen])
