"""A random transform that a user's own data set applies in its [i], moved to every serve.

    def __getitem__(self, i):
        picture = Image.open(self.paths[i]).convert("RGB")
        picture = self.transform(picture)  # redone at every serve, for what it was given here
        return picture, self.labels[i]

A copy of the data set has another transform, which keeps its arguments and returns a `LaterResult`,
on which any operation is an error: where a sample has one, the data set does nothing with the
result. Before that, some samples are read both ways with equal random numbers, and must be equal.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from loaders.adopting.probing import PROBE_STREAM, digests_of
from loaders.adopting.torchvision_steps import Form, batched, name_of, torchvision_name
from loaders.adopting.transforms import Decode, Step, form_of, split_transform
from loaders.errors import FrozenDraw
from loaders.pixels.augmentation import Augmentation
from loaders.slots.leaves import as_tensor, copy_object, leaves_of, like_mapping, picture_number
from loaders.sources.randomness import generators_of, seeded_randomness

LIFTED = ("transform", "transforms")
"""The attributes that are taken out. Other random attributes are reported to the user."""
ORIENTATION = 0x0112
"""EXIF's number for how a picture is to be turned."""
OF_EVERY_CLASS = frozenset(
    {"__class__", "__dict__", "__doc__", "__getattribute__", "__init__", "__init_subclass__"}
    | {"__module__", "__new__", "__subclasshook__", "__weakref__"}
)
OF_ONE_OBJECT = ("__del__", "__getitems__")
"""A copy would free shared resources with __del__, or read several samples at once."""
KeyPath = tuple[Any, ...]
"""The keys that lead to a part of a sample."""
KeyPaths = dict[int | str, KeyPath]
"""The path to the result for each argument of a transform."""


class HandledResult(Exception):
    """A data set does more with a transform's result than put it into the sample."""


class LaterResult:
    """Stands for the later result of a transform for one of its arguments."""

    __slots__ = ("argument", "given")

    def __init__(self, argument: int | str, given: Mapping[int | str, Any]) -> None:
        object.__setattr__(self, "argument", argument)
        object.__setattr__(self, "given", given)

    def __getattribute__(self, name: str) -> Any:
        raise HandledResult(f"[i] does something with what it returns ({name})")


def _refusing(name: str) -> Callable[..., Any]:
    return lambda *_, **__: LaterResult.__getattribute__(cast(Any, None), name)


for _name in {*dir(torch.Tensor)} - OF_EVERY_CLASS:
    if _name.startswith("__"):
        setattr(LaterResult, _name, _refusing(_name))


@dataclass(frozen=True, slots=True)
class Lift:
    """How a transform is taken out of its data set, and redone."""

    name: str
    """The attribute that holds it."""
    transform: Callable[..., Any]
    prefix: tuple[Step, ...]
    """Its deterministic first steps, which are applied before the argument is kept."""
    rest: tuple[Step, ...]
    paths: KeyPaths | None = None
    """None: they are not known yet."""
    form: Form | None = None
    """The form of its argument, if that is the picture of the sample and nothing else is redone."""

    @property
    def __name__(self) -> str:
        return ", ".join(map(name_of, self.rest))

    @property
    def report(self) -> str:
        kept = ", ".join(map(name_of, self.prefix)) or f"what .{self.name} is given"
        return f"cached: {kept}; redone at every serve: {self.__name__} (taken out of .{self.name})"

    def batched(self) -> list[Augmentation] | None:
        """Our steps for the rest, if they cover all of it."""
        ours = None if self.form is None else batched(self.rest, None, self.form)
        return ours if isinstance(ours, list) else None

    def deferred(self, *given: Any, **named: Any) -> Any:
        """Called in place of the transform: keeps the arguments."""
        if bool(given) == bool(named):
            raise HandledResult("it is called with arguments both with and without names")
        if self.prefix and len(given) == 1:
            given = (Decode(self.prefix)(given[0]),)
        kept = {key: self._copy_given(value) for key, value in (*enumerate(given), *named.items())}
        results = {key: LaterResult(key, kept) for key in kept}
        return results if named else results[0] if len(given) == 1 else tuple(results.values())

    def _copy_given(self, value: Any) -> Any:
        """A copy, because the data set may go on to change what it gave."""
        if not isinstance(value, Image.Image):
            return copy_object(value)
        turned = value.getexif().get(ORIENTATION, 1) != 1
        if turned and not all(map(torchvision_name, self.rest)):
            raise HandledResult("it may turn pictures by their EXIF, and only pixels are kept")
        return value.copy()

    def __call__(self, sample: Any) -> Any:
        """The sample with results in place of arguments."""
        paths = self.paths or {}
        given = {key: _part(sample, path) for key, path in paths.items()}
        if 0 not in given:
            made: Any = self.transform(**cast(dict[str, Any], given))
        elif len(given) > 1:
            made = dict(zip(given, self.transform(*given.values()), strict=True))
        else:
            made = {0: (Decode(self.rest) if self.prefix else self.transform)(given[0])}
        for key, path in paths.items():
            sample = _replace_part(sample, path, made[key])
        return sample


class LiftedReading:
    """The [i] of a data set whose transform was taken out. It is mixed into the user's class, so
    that `isinstance` and messages still show that class."""

    _given: Any
    _lift: Lift

    def __reduce__(self) -> tuple[Any, ...]:
        return lifted, (self._given, self._lift)

    def __getitem__(self, index: int) -> Any:
        """The sample with arguments in place of results; with their paths, if these are new."""
        lift = self._lift
        try:
            sample: Any = cast(Any, super()).__getitem__(index)
            results = dict(_results_in(sample))
            calls = [object.__getattribute__(result, "given") for result in results.values()]
            if not calls or any(call is not calls[0] for call in calls):
                raise HandledResult(
                    f"[i] returns {len(calls)} results of it, not those of one call"
                )
            keys = [object.__getattribute__(result, "argument") for result in results.values()]
            paths = dict(zip(keys, results, strict=True))
            if not len(keys) == len(paths) == len(calls[0]) or lift.paths not in (None, paths):
                raise HandledResult("its results are elsewhere in the sample, or not there once")
        except HandledResult as error:
            if lift.paths is None:
                raise
            raise FrozenDraw(
                f"sample {index} of {type(self).__name__} is not made as others are, whose"
                f" .{lift.name} is redone at every serve: {error}; {advice(lift.name)}, or give"
                " reuse=1 and no cache"
            ) from None
        paths = {key: paths[key] for key in calls[0]}
        for key, path in paths.items():
            sample = _replace_part(sample, path, calls[0][key])
        return (sample, paths) if lift.paths is None else sample


def lifted(dataset: Any, lift: Lift) -> Any:
    """A copy of the data set, or of the one that it is a subset of, without its transform."""
    kind = type(dataset)
    if kind in (Subset, ConcatDataset):
        made = copy.copy(dataset)
        if kind is Subset:
            made.dataset = lifted(made.dataset, lift)
        else:
            made.datasets = [lifted(part, lift) for part in made.datasets]
        return made
    for name in OF_ONE_OBJECT:
        if hasattr(kind, name):
            raise HandledResult(f"{kind.__name__} has {name}, so no copy may read in its place")
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = object.__new__(type(kind.__name__, (LiftedReading, kind), names))
    vars(made).update(vars(dataset), _given=dataset, _lift=lift, **{lift.name: lift.deferred})
    return made


def possible_lifts(dataset: Any) -> Iterator[Lift]:
    """A lift for each attribute that may be a transform, the likely ones first. A ConcatDataset has
    those that all its parts share."""
    first, *others = _holders(dataset)
    held: dict[str, Any] = getattr(first, "__dict__", {})
    for name in sorted(held, key=lambda name: (name not in LIFTED, name)):
        alike = all(getattr(other, name, None) is held[name] for other in others)
        if callable(held[name]) and not isinstance(held[name], type) and alike:
            split = split_transform(held[name])
            yield Lift(name, held[name], split.decode.steps if split.decode else (), split.rest)


class ReadBothWays:
    """A data set whose [i] gives the paths and form that sample i shows for a lift, or the reason
    why the sample differs if the transform is applied afterwards."""

    def __init__(self, probed: Any, lift: Lift) -> None:
        self.probed = probed
        self._lift = lift

    def __getitem__(self, index: int) -> tuple[KeyPaths, Form | None] | str:
        held = generators_of(self.probed)

        def seeded(make: Callable[[], Any]) -> Any:
            with seeded_randomness(PROBE_STREAM, index, held=held):
                return make()

        whole, again = (seeded(lambda: digests_of(self.probed[index])) for _ in range(2))
        if whole != again:
            return "what [i] does beside it is random, too"
        try:
            sample, paths = seeded(lambda: lifted(self.probed, self._lift)[index])
            given = [leaf for path in paths.values() for leaf in leaves_of(_part(sample, path))]
            if not any(getattr(as_tensor(leaf), "ndim", 0) for leaf in given):
                return "it is given no array and no picture, so it reads them itself"
            number = picture_number(sample)
            alone = [*paths] == [0] and number is not None and leaves_of(sample)[number] is given[0]
            form = form_of(given[0]) if alone else None
            lift = replace(self._lift, paths=paths)
            same = seeded(lambda: digests_of(lift(sample))) == whole
        except Exception as error:
            handled = isinstance(error, HandledResult)
            return str(error) if handled else f"{type(error).__name__}: {error}"
        return (paths, form) if same else "applied afterwards, it gives another sample"


def advice(name: str) -> str:
    """How to take a transform out by hand."""
    augment = "WholeSample(lambda sample: t(*sample))" if name == "transforms" else "t"
    return (
        f"let [i] return what self.{name} gives as it is, or take it out:"
        f" `t, dataset.{name} = dataset.{name}, None`, and give augment={augment}"
    )


def _holders(dataset: Any) -> list[Any]:
    if type(dataset) is Subset:
        return _holders(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [holder for part in dataset.datasets for holder in _holders(part)]
    return [dataset]


def _results_in(part: Any, *path: Any) -> Iterator[tuple[KeyPath, LaterResult]]:
    if type(part) is LaterResult:
        yield path, part
    elif isinstance(part, Mapping | list | tuple):
        for key in part if isinstance(part, Mapping) else range(len(part)):
            yield from _results_in(part[key], *path, key)


def _part(sample: Any, path: KeyPath) -> Any:
    for key in path:
        sample = sample[key]
    return sample


def _replace_part(sample: Any, path: KeyPath, part: Any) -> Any:
    """A copy of the sample with another part at this path."""
    if not path:
        return part
    inside = _replace_part(sample[path[0]], path[1:], part)
    if isinstance(sample, Mapping):
        return like_mapping(sample, {**sample, path[0]: inside})
    parts = [*sample]
    parts[path[0]] = inside
    return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
