"""Generators of random numbers: those that an object holds, and code that runs with them seeded.

A user's own code draws from generators with a state: torch's, numpy's, Python's, or those that its
objects hold. While such code runs here, all of these are seeded, and then restored: its draws are a
function of the seed, and no other randomness changes.
"""

import functools
import hashlib
import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

MASK = (1 << 64) - 1
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MOST_OBJECTS = 5000
"""So many objects are searched for generators, breadth first."""
MOST_ITEMS = 100
"""So many items of a list or dict are searched: a list of transforms is short."""
NOT_OURS = frozenset(
    {"PIL", "builtins", "collections", "cv2", "functools", "numpy", "pathlib", "torch"}
    | {"torchvision"}
)
"""Classes and functions of these packages hold no generator; their objects may."""
PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, torch.Tensor, ModuleType)


class SeededGenerators:
    """Torch's generator (CPU), numpy's, Python's, and those that a user's objects hold."""

    def __init__(self, held: Iterable[object]) -> None:
        self._all: list[tuple[str, Any]] = [
            ("torch's generator", torch.default_generator),
            ("Python's random", random),
            ("numpy.random", np.random),
            *((f"a {type(generator).__qualname__} of its own", generator) for generator in held),
        ]
        self._before = [_state(generator) for _, generator in self._all]

    def seed(self, *entropy: int) -> None:
        numbers = np.random.SeedSequence([each & MASK for each in entropy])
        for (_, generator), child in zip(self._all, numbers.spawn(len(self._all)), strict=True):
            _seed(generator, int(child.generate_state(1, np.uint64)[0]))

    def digests(self) -> list[tuple[str, bytes]]:
        """The name of each generator, and a digest of its state now."""
        return [(name, _digest(_state(generator))) for name, generator in self._all]

    def restore(self) -> None:
        for (_, generator), state in zip(self._all, self._before, strict=True):
            _set_state(generator, state)


@contextmanager
def seeded_randomness(*entropy: int, held: Iterable[object] = ()) -> Iterator[SeededGenerators]:
    """Seed the generators of torch (CPU), numpy and Python, and those in `held`, from `entropy`;
    restore them at the end. Without entropy they are only restored."""
    generators = SeededGenerators(held)
    try:
        if entropy:
            generators.seed(*entropy)
        yield generators
    finally:
        generators.restore()


def generators_of(owner: object) -> list[object]:
    """The generators that `owner` holds: in its attributes and those of the objects inside it, in
    the bound values of its functions, and in the globals that these name."""
    generators: list[object] = []
    visited_ids: set[int] = set()
    visited: list[object] = []  # it keeps temporary objects alive, so that no id comes twice
    waiting = deque([owner])
    while waiting and len(visited) < MOST_OBJECTS:
        thing = waiting.popleft()
        if isinstance(thing, PLAIN) or id(thing) in visited_ids:
            continue
        visited_ids.add(id(thing))
        visited.append(thing)
        if isinstance(thing, KINDS):
            if not isinstance(thing, random.SystemRandom):  # which cannot be seeded
                generators.append(thing)
        else:
            waiting.extend(_parts_of(thing))
    return generators


def _parts_of(thing: Any) -> Iterator[object]:
    if isinstance(thing, dict):
        yield from islice(thing.values(), MOST_ITEMS)
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from islice(thing, MOST_ITEMS)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, FunctionType):
        yield from _values_in(thing)
        return
    elif isinstance(thing, type):
        if not _is_foreign(thing):
            yield from vars(thing).values()
        return
    elif isinstance(thing, staticmethod | classmethod):
        yield thing.__func__
    elif isinstance(thing, property):
        yield thing.fget
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        yield from (getattr(thing, name, None) for name in slots_of(kind))
        yield kind


def _values_in(function: FunctionType) -> Iterator[object]:
    if _is_foreign(function):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is not bound yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names_in(function.__code__):
        yield function.__globals__.get(name)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def slots_of(kind: type) -> Iterable[str]:
    """The names of the attributes that a class keeps outside of `__dict__`."""
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def attributes_of(thing: object) -> dict[str, Any]:
    """The attributes that an object has itself: in `__dict__`, or in slots of its classes."""
    slots = [name for kind in type(thing).__mro__ for name in slots_of(kind)]
    return getattr(thing, "__dict__", {}) | {name: getattr(thing, name, None) for name in slots}


def _is_foreign(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] in NOT_OURS


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator | np.random.RandomState) or generator is np.random:
        return generator.get_state()
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState) or generator is np.random:
        generator.set_state(state)
    else:
        generator.setstate(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif generator is np.random or isinstance(generator, np.random.RandomState):
        generator.seed(seed % (1 << 32))
    else:
        generator.seed(seed)


def _digest(state: Any) -> bytes:
    data = state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
    return hashlib.blake2b(data, digest_size=16).digest()
