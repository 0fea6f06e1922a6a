"""Whether reading a sample draws random numbers, found out while samples are read.

The states of the generators are compared before and after some samples, which costs less than a
hundredth of decoding them. If one has moved, those samples are looked at one by one. A sample whose
reader seeds the generators from its number leaves them in the same state each time: that is no
draw by chance.
"""

from collections.abc import Sequence
from typing import Any

from loaders.errors import FrozenDraw
from loaders.sources.randomness import SeededGenerators, generators_of

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
                    " is random as augment=, which is drawn anew for every serve; or give reuse=1"
                    " and no cache; or reaugment=False, if every serve of a pass may repeat its"
                    " draw"
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
