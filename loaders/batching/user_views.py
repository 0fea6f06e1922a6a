"""The views of a serve that a user's own code makes of one sample: of its picture, or of all of it.

Such code may draw from the generators that all threads of a process share. So it runs one sample at
a time: in worker processes, where there are some, else on the consumer's thread. For each view of
each sample the generators are seeded, those that the function holds too, and afterwards put back
(`SeededFunction`). The first few results are made twice, to see whether it draws from elsewhere.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from loaders.adopting.probing import digests_of
from loaders.adopting.torchvision_steps import name_of
from loaders.adopting.transforms import PerSample
from loaders.errors import SampleShapeError
from loaders.pixels.augmentation import Augmentation, Draws, view_keys
from loaders.slots.leaves import as_tensor, copy_object
from loaders.slots.slab import Slab
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
        again = copy_object(argument)
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


Transform = Callable[[Any], Any]
Changed = Callable[[Sequence[Any], Sequence[int], Sequence[int]], list[Any]]
SEEDED = "let it draw from torch, numpy.random, random, or generators among its attributes"


@dataclass(frozen=True, slots=True)
class WholeSample:
    """An augmentation that gets a whole sample, as the data set returned it, and returns one: for
    transforms that move masks, boxes and key points by themselves."""

    function: Transform

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    def __call__(self, sample: Any) -> Any:
        return self.function(sample)


class UserView:
    """One view: a function of one sample or picture, or one of a batch, which gets one of 1."""

    def __init__(self, augment: Augmentation | Transform, batched: bool) -> None:
        if isinstance(augment, WholeSample):
            augment = augment.function
        self._batched = cast(Augmentation, augment) if batched else None
        self._transform = None if batched else SeededFunction(cast(Transform, augment))
        self._check = RepetitionCheck(augment, SEEDED)

    def __call__(self, argument: Any, key: int) -> Any:
        if (transform := self._transform) is not None:
            return self._check.call(lambda argument: transform(argument, key), argument)
        assert self._batched is not None
        pixels = cast(torch.Tensor, as_tensor(argument))
        with seeded_randomness(key):
            return self._batched(pixels[None], Draws(np.array([key], dtype=np.uint64)))[0]


class UserViews:
    """All views of a serve, where one of them is made by a user's own code."""

    def __init__(
        self, augments: Sequence[Augmentation | Transform], batched: Sequence[bool], several: bool
    ) -> None:
        """`several`: whether a sample has a list of views, or the only one as it is."""
        self._made_of = tuple(augments), tuple(batched), several
        self._views = [UserView(*each) for each in zip(augments, batched, strict=True)]
        self._several = several
        self._whole = any(isinstance(augment, WholeSample) for augment in augments)
        self._returned: tuple[int, int] | None = None
        """The first sample whose picture became a list, and how long it was."""

    def __reduce__(self) -> Any:
        return UserViews, self._made_of  # another process finds the generators that they hold there

    def __call__(self, argument: Any, key: int) -> Any:
        """What one picture, or a whole sample, becomes."""
        if not self._several:
            return self._views[0](argument, key)
        serve = np.array([key], dtype=np.uint64)
        return [
            view(copy_object(argument), int(view_keys(serve, number)[0]))
            for number, view in enumerate(self._views)
        ]

    def pickled(self) -> bytes | None:
        """These views for worker processes. None, with a warning: they cannot be sent there."""
        try:
            return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            names = ", ".join(name_of(cast(Any, augment)) for augment in self._made_of[0])
            log.warning(
                "the augmentation %s cannot be sent to the worker processes: %s. So it runs on the"
                " thread that asks for batches; define it in a module that can be imported",
                names,
                error,
            )
            return None

    def samples(
        self,
        samples: Sequence[Any],
        slab: Slab,
        keys: Sequence[int],
        ids: Sequence[int],
        changed: Changed | None = None,
    ) -> list[Any]:
        """The augmented samples; None, or one without a picture, stays as it is.
        `changed(arguments, ids, keys)` calls these views elsewhere."""
        nests = [slab.nest_and_picture(sample) for sample in samples]
        if self._whole:
            picked = [n for n, sample in enumerate(samples) if sample is not None]
            arguments = [samples[n] for n in picked]
        else:
            picked = [n for n, (_, number) in enumerate(nests) if number >= 0]
            arguments = [nests[n][0].leaves(samples[n])[nests[n][1]] for n in picked]
        keys, ids = [keys[n] for n in picked], [ids[n] for n in picked]
        if changed is not None:
            made = changed(arguments, ids, keys)
        else:
            made = [self(argument, key) for argument, key in zip(arguments, keys, strict=True)]
        if not self._whole and not self._several:
            self._check_counts(made, ids)
        done = list(samples)
        for n, picture in zip(picked, made, strict=True):
            if self._whole:
                done[n] = picture
                continue
            nest, number = nests[n]
            leaves = nest.leaves(samples[n])
            leaves[number] = picture
            done[n] = nest.sample(leaves)
        return done

    def _check_counts(self, made: Sequence[Any], ids: Sequence[int]) -> None:
        """Refuse a function that returns several views itself, and not always as many."""
        for views, sample_id in zip(made, ids, strict=True):
            if not isinstance(views, list | tuple):
                continue
            self._returned = self._returned or (sample_id, len(views))
            first, count = self._returned
            if len(views) != count:
                raise SampleShapeError(
                    f"augment returned {count} views of sample {first} and {len(views)} of sample"
                    f" {sample_id}: let it return as many of every sample"
                )
