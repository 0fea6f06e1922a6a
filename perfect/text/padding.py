"""Pads texts of several lengths to one of a few, so that a step needs few graphs.

    ids      a b c . . . . .      pad to 8      . is id 0
    targets  b c d x x x x x                    x is IGNORED: the loss leaves it out

Nothing that is learned changes by it, but for the last bits: a causal model's output at a token
depends on the tokens before it alone, padding stands behind them, and the loss is the mean over the
targets that are there.
"""

from bisect import bisect_left
from collections.abc import Sequence
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
