"""Chooses the few lengths that batches of texts are padded to. Pure.

    longest of a batch   12  17  30  31  64        padded to its own longest: five graphs
    lengths              |-->17  |-->31  64        padded to the next length: three graphs

Every length is a graph of the step (docs/offload/lengths.md), and padding is computed like text.
So it is the fewest lengths with which batches have at most `WASTE` more tokens than if each were
padded to its own longest sample.
"""

from collections.abc import Mapping

MOST = 8
WASTE = 0.1
MULTIPLE = 8
"""Lengths are multiples of it, for kernels' sake, but for the longest."""


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
    """Return, by length, the part of all batches whose longest sample has it. Batches are drawn at
    random."""
    whole, before, seen = sum(counts.values()), 0.0, 0
    found: dict[int, float] = {}
    for length in sorted(counts):
        seen += counts[length]
        so_far = (seen / whole) ** batch
        found[length] = so_far - before
        before = so_far
    return found


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
