"""Whether reading a sample again gives the same sample: what is random would be frozen by reuse.

A few samples are read a few times in a mixed order, under other seeds each time. Reading varies

    if a generator of torch, numpy or Python, or one that the data set holds, has moved on, and
    stands elsewhere than after the other reads of this sample;
    or if a part of the sample differs from what the first read of it gave.

The first rule finds all draws from such generators, unless the reader seeds them from the sample's
number. The second one finds other generators, counters and clocks; of changes with probability 1/2
it misses 4 in a million. Where a sample takes long, reading stops after SECONDS and two reads.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import islice
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from loaders.slots.leaves import Chunk, as_tensor
from loaders.sources.randomness import attributes_of, generators_of, seeded_randomness

READS = 24
SAMPLES = 6
SECONDS = 2.0
PROBE_STREAM = 3
"""Probes draw from another stream than samplers."""
MOST_DEPTH, MOST_PARTS = 20, 5000
"""What lies deeper in a sample, and what comes after so many parts, is not compared."""
NO_ATTRIBUTES = (Image.Image, np.ndarray, type, FunctionType, ModuleType, PurePath, Enum)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ProbedReads:
    """A data set whose [i] describes what reading sample i gave: a digest of each part, one of each
    generator that moved, and how large it is."""

    def __init__(self, probed: Any) -> None:
        self.probed = probed
        self._reads = 0

    def __getitem__(self, sample_id: int) -> tuple[dict[str, bytes], dict[str, bytes], int]:
        # The first read draws from the generators as they are: if a data set draws something once
        # at its first read, and keeps it, that comes from the user's own seed.
        entropy = (PROBE_STREAM, self._reads) if self._reads else ()
        self._reads += 1
        with seeded_randomness(*entropy, held=generators_of(self.probed)) as generators:
            before = generators.digests()
            sample = self.probed[sample_id]
            after = generators.digests()
        moved = {
            f"{n}: {name}": state
            for n, ((name, state), old) in enumerate(zip(after, before, strict=True))
            if (name, state) != old
        }
        return digests_of(sample), moved, bytes_of(sample)


def variation(samples: int, read: Callable[[Sequence[int]], Chunk]) -> str | None:
    """How two reads of a sample differed, as the beginning of a sentence; None: they did not.
    `read` reads `ProbedReads`. Unreadable samples are left out."""
    first: dict[int, tuple[dict[str, bytes], dict[str, bytes]]] = {}
    unreadable: set[int] = set()
    until = time.monotonic() + SECONDS
    for number, sample_id in enumerate(schedule(samples)):
        if number >= 2 and time.monotonic() > until:
            break
        if sample_id in unreadable:
            continue
        chunk = read([sample_id])
        if chunk.error is not None:
            if not isinstance(chunk.error, Exception):
                raise chunk.error
            unreadable.add(sample_id)
            continue
        digests, moved, _ = cast(Any, chunk.samples[0])
        if sample_id not in first:
            first[sample_id] = digests, moved
            continue
        change = _difference(first[sample_id][0], digests) or _draws(first[sample_id][1], moved)
        if change:
            return f"{change} when sample {sample_id} was read again"
        # A generator that moved for the first time is compared with the next reads.
        first[sample_id][1].update(moved)
    return None


def schedule(samples: int) -> list[int]:
    """The ids that are read, in turn, at distances that differ: a periodic change must show."""
    ids = np.unique(np.linspace(0, samples - 1, SAMPLES).astype(int))
    again = np.repeat(ids, READS // len(ids))
    rest = np.random.default_rng(0).permutation(again[2:])
    return [int(ids[0])] * min(2, len(again)) + rest.tolist()


def digests_of(sample: Any) -> dict[str, bytes]:
    """A digest of each part of a sample. They are equal where two samples are."""
    return {where: _digest(part) for where, part in islice(parts(sample), MOST_PARTS)}


def bytes_of(sample: Any) -> int:
    """The bytes of the arrays in a sample."""
    values = (as_tensor(part) for _, part in islice(parts(sample), MOST_PARTS))
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def parts(sample: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The parts of a sample, and where they are in it; an object's attributes are parts of it."""
    if isinstance(sample, np.ndarray) and sample.dtype == object:
        sample = sample.tolist()
    inside: list[tuple[str, Any]] = []
    if isinstance(sample, dict):
        inside = [(f"[{key!r}]", part) for key, part in sample.items()]
    elif isinstance(sample, list | tuple):
        inside = [(f"[{number}]", part) for number, part in enumerate(sample)]
    else:
        yield where, sample
        if not isinstance(sample, NO_ATTRIBUTES):
            inside = [(f".{name}", part) for name, part in attributes_of(sample).items()]
    if depth < MOST_DEPTH:
        for name, part in inside:
            yield from parts(part, where + name, depth + 1)


def _difference(first: dict[str, bytes], again: dict[str, bytes]) -> str:
    for where in [*first, *again]:
        if first.get(where) != again.get(where):
            return f"its part {where} was different" if where else "it was different"
    return ""


def _draws(first: dict[str, bytes], again: dict[str, bytes]) -> str:
    for name, state in again.items():
        if first.get(name, state) != state:
            return f"random numbers were drawn from {name.split(': ', 1)[1]}"
    return ""


def _digest(part: Any) -> bytes:
    digest = hashlib.blake2b(f"{type(part).__module__}.{type(part).__qualname__}".encode())
    value = as_tensor(part) if not isinstance(part, torch.Tensor) else part.detach()
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(_bytes_of(value.as_subclass(torch.Tensor)))
    elif isinstance(value, np.ndarray):
        digest.update(repr((value.dtype, value.shape, value.tolist())).encode())
    elif isinstance(value, set | frozenset):
        printed = sorted(ADDRESS.sub("", repr(each)) for each in value)
        digest.update(repr(printed).encode("utf-8", "surrogatepass"))
    elif isinstance(value, str | bytes | int | float | complex | Enum | PurePath):
        digest.update(repr(value).encode("utf-8", "surrogatepass"))
    return digest.digest()[:16]


def _bytes_of(value: torch.Tensor) -> bytes:
    if not value.numel():
        return b""  # torch views no empty array as bytes
    if value.layout is not torch.strided or value.device.type != "cpu":
        value = (value.to_dense() if value.layout is not torch.strided else value).cpu()
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
