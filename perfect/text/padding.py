"""Pads texts of several lengths to one of a few, so that a step needs few graphs.

    ids      a b c . . . . .      pad to 8      . is id 0
    targets  b c d x x x x x                    x is IGNORED: the loss leaves it out

    longest of a batch   12  17  30  31  64        padded to its own longest: five graphs
    lengths              |-->17  |-->31  64        padded to the next length: three graphs

Padding changes only the last bits of what is learned: a causal model's output at a token depends on
the tokens before it alone, padding comes after them, and the loss is the mean over the targets that
are there. `lengths_for` chooses the fewest lengths with which batches have at most `WASTE` more
tokens than if each were padded to its own longest sample.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loaders.errors import SourceError

IGNORED = -100
"""The target that `cross_entropy` leaves out."""


@dataclass(frozen=True, slots=True)
class PadToLengths:
    """A collate function for samples of (ids, targets), each of one dimension."""

    lengths: tuple[int, ...]
    """What batches are padded to, ascending. The last one holds every sample."""

    def __call__(
        self, samples: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(ids) for ids, _ in samples)
        at = bisect_left(self.lengths, longest)
        if at == len(self.lengths):
            raise SourceError(
                f"a sample has {longest} tokens, and batches are padded to"
                f" {', '.join(map(str, self.lengths))}: give {longest} as a length, too"
            )
        shape = len(samples), self.lengths[at]
        ids = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORED, dtype=torch.int64)
        for row, (given, following) in enumerate(samples):
            ids[row, : len(given)] = given
            targets[row, : len(following)] = following
        return ids, targets


MOST = 8
WASTE = 0.1
MULTIPLE = 8
"""All lengths but the longest are multiples of it, which kernels need to be fast."""


def lengths_for(counts: Mapping[int, int], batch: int, longest: int) -> tuple[int, ...]:
    """Return lengths for batches of `batch` samples, in ascending order; the last is `longest`.
    `counts`: how many samples there are of each length."""
    rounded: dict[int, int] = {}
    for length, count in counts.items():
        least = min(-(-length // MULTIPLE) * MULTIPLE, longest)
        rounded[least] = rounded.get(least, 0) + count
    weights = longest_of_batches(rounded, batch)
    weights.setdefault(longest, 0.0)
    ideal = sum(length * weight for length, weight in weights.items())
    for most in range(1, MOST):
        chosen = chosen_lengths(weights, most)
        if padded(weights, chosen) <= (1 + WASTE) * ideal:
            return chosen
    return chosen_lengths(weights, MOST)


def longest_of_batches(counts: Mapping[int, int], batch: int) -> dict[int, float]:
    """Return, by length, the part of all batches, drawn at random, whose longest has it."""
    whole, before, seen = sum(counts.values()), 0.0, 0
    shares: dict[int, float] = {}
    for length in sorted(counts):
        seen += counts[length]
        so_far = (seen / whole) ** batch
        shares[length] = so_far - before
        before = so_far
    return shares


def padded(weights: Mapping[int, float], lengths: tuple[int, ...]) -> float:
    """Return the mean length that batches are padded to."""
    return sum(w * next(n for n in lengths if n >= length) for length, w in weights.items())


def chosen_lengths(weights: Mapping[int, float], most: int) -> tuple[int, ...]:
    """Return at most so many lengths, among them the longest, that pad least. `weights`: by the
    length that a batch needs, how many batches there are."""
    needed = sorted(weights)
    # least[n]: what the batches of the n shortest kinds are padded to with so many lengths, and
    # which lengths these are.
    least: list[tuple[float, tuple[int, ...]]] = []
    total = 0.0
    for length in needed:
        total += weights[length]
        least.append((total * length, (length,)))
    for _ in range(most - 1):
        better = list(least)
        for n, length in enumerate(needed):
            inside = 0.0
            for before in range(n - 1, -1, -1):
                inside += weights[needed[before + 1]]
                cost = least[before][0] + inside * length
                if cost < better[n][0]:
                    better[n] = (cost, (*least[before][1], length))
        least = better
    return least[-1][1]
