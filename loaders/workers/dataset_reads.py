"""Reading samples: several at once where the data set can, and watched for random draws.

The states of the generators are compared before and after some samples. If one has moved, those are
read one by one to find which. A reader that seeds the generators from a sample's number leaves them
in the same state each time: that is no random draw.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loaders.errors import FrozenDraw, LoaderError
from loaders.slots.leaves import Sample
from loaders.sources.randomness import SeededGenerators, generators_of

log = logging.getLogger(__name__)

Many = Callable[[list[int]], Iterable[Sample]]


def read_at_once(many: Many | None, ids: Sequence[int]) -> list[Sample] | None:
    """The samples. None: they are to be read singly, so that whatever fails has its id."""
    if many is None or len(ids) < 2:
        return None
    try:
        together = list(many(list(ids)))
    except Exception:
        log.debug("%d samples could not be read at once, so they are read singly", len(ids))
        return None
    if len(together) != len(ids):
        whose = type(getattr(many, "__self__", many)).__name__
        raise LoaderError(
            f"__getitems__ of {whose} gave {len(together)} samples for {len(ids)} ids: let it give"
            " one for each, in their order, or leave it out"
        )
    return together


SURE = 32
"""After so many samples whose reader seeds the generators itself, no more are read twice."""


class DrawWatch:
    """Watches the generators that reading a data set may draw from."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._seeding = 0
        self.held = generators_of(dataset)
        self.generators = SeededGenerators(self.held)
        self._marks: list[tuple[str, bytes]] = []

    def mark(self) -> None:
        self._marks = self.generators.digests()

    @property
    def moved(self) -> bool:
        """Whether a generator has moved since `mark`."""
        return self.generators.digests() != self._marks

    def refuse_draws(self, ids: Sequence[int]) -> None:
        """Refuse samples whose reading draws by chance: their draws would be served again."""
        for sample_id in ids:
            if self._seeding < SURE and (name := self._drawn_from(sample_id)):
                raise FrozenDraw(
                    f"reading sample {sample_id} of {type(self._dataset).__name__} drew random"
                    f" numbers from {name}, and this draw would be served several times: give what"
                    " is random as augment=, or give reuse=1 and no cache; or reaugment=False, if"
                    " every serve of a pass may repeat its draw"
                )

    def _drawn_from(self, sample_id: int) -> str:
        """The generator that reading a sample draws from by chance. Empty: none."""
        begun, ended = [], []
        for seed in (0, 1):
            self.generators.seed(seed, sample_id)
            begun.append(self.generators.digests())
            self._dataset[sample_id]
            ended.append(self.generators.digests())
        moved = [name for (name, was), now in zip(begun[0], ended[0], strict=True) if now[1] != was]
        both = zip(*ended, strict=True)
        by_chance = {name for (name, first), (_, second) in both if first != second}
        self._seeding += bool(moved) and not by_chance.intersection(moved)
        return next((name for name in moved if name in by_chance), "")
