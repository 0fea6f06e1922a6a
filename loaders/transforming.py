"""A user's own function on one sample or batch, run with the generators that it draws from seeded.

Its random numbers are those of the serve: a resumed run repeats them. A library may draw from
generators of its own (albumentations does): those that a function holds in its attributes, or in
those of the objects inside it, are seeded too; where none is found, its `set_random_seed` is
called. The first few results of a transform are made twice: so one that draws from elsewhere is
noticed.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

from loaders.adopting.probing import digests_of
from loaders.adopting.torchvision_steps import name_of
from loaders.adopting.transforms import PerSample
from loaders.slots.leaves import own_object
from loaders.sources.randomness import generators_of, seeded_randomness

log = logging.getLogger(__name__)

CHECKED = 16
"""So many results are made twice: of a draw between two outcomes, one in 65,000 goes unnoticed."""


class SeededFunction:
    """`function`, to be called on the consumer's thread with the seed of a serve."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._held = generators_of(function)
        inside = function.steps if isinstance(function, PerSample) else (function,)
        seeds = [getattr(each, "set_random_seed", None) for each in inside]
        self._seeds = [] if self._held else [seed for seed in seeds if callable(seed)]

    def __call__(self, argument: Any, key: int) -> Any:
        with seeded_randomness(key, held=self._held):
            for seed in self._seeds:
                seed(key % (1 << 32))
            return self._function(argument)


class RepetitionCheck:
    """Says once if a function gives another result for the same argument and random numbers."""

    def __init__(self, function: object, advice: str) -> None:
        inside = function.steps if isinstance(function, PerSample) else (function,)
        self._name = ", ".join(name_of(cast(Any, each)) for each in inside)
        self._advice = advice
        self._left = CHECKED

    def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """`function(argument)`, which is compared with another such call, the first few times."""
        if self._left <= 0:
            return function(argument)
        self._left -= 1
        again = own_object(argument)
        result = function(argument)
        before = digests_of(result)
        if digests_of(function(again)) != before and self._left >= 0:
            self._left = -1
            log.warning(
                "the augmentation %s is not repeatable: for the same random numbers it gave another"
                " result. So a resumed run sees other draws, and reaugment=False repeats none; %s",
                self._name,
                self._advice,
            )
        return result
