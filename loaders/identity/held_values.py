"""What a data set holds now, as one digest: whether it is still what it was when it was opened.

    attributes       of the data set and of all objects inside it, of its classes too
    functions        their code, what they have bound, and the globals that they read
    arrays           whole up to a limit, above it some blocks, where they lie, torch's version
    anything else    (an open file, a handle of a library) which object it is

No file is looked at and nothing is pickled. A generator of random numbers is told by its type
alone, for it moves on when it is used.
"""

import itertools
import marshal
import re
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.identity.contents import Contents
from loaders.pixels.decode_counts import DecodeCounts
from loaders.sources.randomness import attributes_of
from loaders.torch_seams import version_of

WHOLE_BYTES = 1 << 30
"""So many bytes of arrays are read in all. Of further arrays some blocks are."""
BLOCKS, BLOCK = 64, 1 << 14
LOCAL = ("_thread", "_local")
"""The class of values that each thread has for itself."""
CACHE = re.compile(r"(^|_)cached?(_|$)")
"""What has such a name is what the data set remembers of its own reads."""
SHORT = frozenset({bool, int, float, complex, str, bytes, type(None)})
TRIES = 3
"""A thread that reads the data set may change it meanwhile: then it is told again."""


@dataclass(frozen=True, slots=True)
class HeldValues:
    """What a data set held at some time. Another process has none: there are other objects."""

    digest: str
    kept: list[object] = field(compare=False)
    """The objects that were told by their ids, so that no other one gets such an id."""

    @classmethod
    def of(cls, dataset: Any) -> "HeldValues | None":
        """What the data set holds now. None: it changes all the time."""
        for _ in range(TRIES):
            contents = _HeldContents()
            try:
                contents.tell(dataset, "")
            except RuntimeError:  # something changed its size while it was told
                continue
            return cls(contents.hexdigest(), contents.kept)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldValues, ("", [])


class _HeldContents(Contents):
    """Tells objects by what they hold in this process."""

    def __init__(self, files: Any = None) -> None:
        super().__init__(files)
        self._bytes_left = WHOLE_BYTES

    def tell(self, thing: object, way: str) -> None:
        if isinstance(thing, list) and _is_plain_table(thing):
            self.update(marshal.dumps(thing, 2))  # quicker than the text of a million names
        else:
            super().tell(thing, way)

    def _tell_files(self, leaves: list[Any], alone: bool, way: str) -> None: ...

    def _tell_array(self, array: NDArray[Any], way: str) -> None:
        if array.dtype.hasobject:
            super()._tell_array(array, way)
            return
        self.update(f"{array.dtype.descr} {array.shape} {array.strides} {array.ctypes.data}")
        if array.nbytes > self._bytes_left and not array.flags.c_contiguous:
            array = array[:: max(1, len(array) // BLOCKS)]
        self._tell_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _tell_tensor(self, tensor: torch.Tensor, way: str) -> None:
        plain = tensor.layout is torch.strided and not tensor.is_inference()
        version = version_of(tensor) if plain else 0
        if tensor.device.type != "cpu":
            self.update(f"{tensor.dtype} {tuple(tensor.shape)} {id(tensor)} {version}")
            return
        self.update(f"version {version}")
        super()._tell_tensor(tensor, way)

    def _tell_bytes(self, data: NDArray[np.uint8]) -> None:
        if len(data) <= self._bytes_left:
            self._bytes_left -= len(data)
            super()._tell_bytes(data)
            return
        for begin in np.linspace(0, len(data) - BLOCK, BLOCKS).astype(np.int64).tolist():
            super()._tell_bytes(data[begin : begin + BLOCK])

    def _tell_name_of_class(self, kind: type) -> None:
        self.update(f"class {id(kind)}")

    def _tell_name_of_function(self, function: types.FunctionType) -> None:
        self.update(f"function {id(function.__code__)}")

    def _tell_code(self, function: types.FunctionType) -> None: ...

    def _tell_object(self, thing: object, way: str) -> None:
        kind = type(thing)
        self.tell(kind, way)
        # Threads that read have values of their own, and reading our own sources counts.
        by_thread = any((k.__module__, k.__name__) == LOCAL for k in kind.__mro__)
        if by_thread or isinstance(thing, DecodeCounts):
            self.update(f"object {id(thing)}")
            return
        held = attributes_of(thing)
        inside = isinstance(thing, dict | list | tuple | types.MappingProxyType)
        if inside:
            self._tell_container(thing, way)
        elif not held:
            self.update(f"object {id(thing)}")
        for name, value in [*held.items()]:
            if CACHE.search(str(name)):
                continue
            self.update(repr(name))
            self.tell(value, way)


def _is_plain_table(rows: list[Any]) -> bool:
    """Whether a list has plain values, or rows of plain values."""
    kinds = set(map(type, rows))
    if kinds and kinds <= {list, tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(rows)))
    return kinds <= SHORT
