"""A digest of what a data set holds now. It shows whether the data set was changed in place.

    attributes       of the data set, of all objects inside it, and of its classes
    functions        their code, their bound values, and the globals that they read
    arrays           all bytes up to a limit, then some blocks; address; torch's version counter
    anything else    (an open file, a handle of a library) the id of the object

No file is looked at and nothing is pickled. Using a generator does not count.
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

from loaders.identity.contents import ContentDigest
from loaders.pixels.jpegs import DecodeCounts
from loaders.sources.randomness import attributes_of
from loaders.torch_seams import version_of

WHOLE_BYTES = 1 << 30
"""The most bytes of arrays that are read in full. Of further arrays, some blocks are read."""
BLOCKS, BLOCK = 64, 1 << 14
LOCAL = ("_thread", "_local")
"""The class of values that each thread has for itself."""
CACHE = re.compile(r"(^|_)cached?(_|$)")
"""The names of attributes in which a data set caches its own reads."""
SHORT = frozenset({bool, int, float, complex, str, bytes, type(None)})
TRIES = 3
"""If a thread changes the data set while it is hashed, hashing starts again, at most so often."""


@dataclass(frozen=True, slots=True)
class HeldValues:
    """What a data set held at some time. It is empty in another process, whose objects differ."""

    digest: str
    kept: list[object] = field(compare=False)
    """The objects that count by their ids stay alive, so that no other object gets such an id."""

    @classmethod
    def read_from(cls, dataset: Any) -> "HeldValues | None":
        """What the data set holds now. None: it changes all the time."""
        for _ in range(TRIES):
            contents = _HeldDigest()
            try:
                contents.add(dataset, "")
            except RuntimeError:  # something changed its size while it was hashed
                continue
            return cls(contents.hexdigest(), contents.kept)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldValues, ("", [])


class _HeldDigest(ContentDigest):
    """A digest of objects by what they hold in this process."""

    def __init__(self, files: Any = None) -> None:
        super().__init__(files)
        self._bytes_left = WHOLE_BYTES

    def add(self, thing: object, where: str) -> None:
        if isinstance(thing, list) and _is_plain_table(thing):
            self.update(marshal.dumps(thing, 2))  # quicker than the text of a million names
        else:
            super().add(thing, where)

    def _add_named_files(self, leaves: list[Any], single: bool, where: str) -> None: ...

    def _add_array(self, array: NDArray[Any], where: str) -> None:
        if array.dtype.hasobject:
            super()._add_array(array, where)
            return
        self.update(f"{array.dtype.descr} {array.shape} {array.strides} {array.ctypes.data}")
        if array.nbytes > self._bytes_left and not array.flags.c_contiguous:
            array = array[:: max(1, len(array) // BLOCKS)]
        self._add_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _add_tensor(self, tensor: torch.Tensor, where: str) -> None:
        plain = tensor.layout is torch.strided and not tensor.is_inference()
        version = version_of(tensor) if plain else 0
        if tensor.device.type != "cpu":
            self.update(f"{tensor.dtype} {tuple(tensor.shape)} {id(tensor)} {version}")
            return
        self.update(f"version {version}")
        super()._add_tensor(tensor, where)

    def _add_bytes(self, data: NDArray[np.uint8]) -> None:
        if len(data) <= self._bytes_left:
            self._bytes_left -= len(data)
            super()._add_bytes(data)
            return
        for begin in np.linspace(0, len(data) - BLOCK, BLOCKS).astype(np.int64).tolist():
            super()._add_bytes(data[begin : begin + BLOCK])

    def _add_class_name(self, kind: type) -> None:
        self.update(f"class {id(kind)}")

    def _add_function_name(self, function: types.FunctionType) -> None:
        self.update(f"function {id(function.__code__)}")

    def _add_code(self, function: types.FunctionType) -> None: ...

    def _add_object(self, thing: object, where: str) -> None:
        kind = type(thing)
        self.add(kind, where)
        # Reading changes thread-local values, and the counts of our own sources.
        by_thread = any((k.__module__, k.__name__) == LOCAL for k in kind.__mro__)
        if by_thread or isinstance(thing, DecodeCounts):
            self.update(f"object {id(thing)}")
            return
        attributes = attributes_of(thing)
        if isinstance(thing, dict | list | tuple | types.MappingProxyType):
            self._add_container(thing, where)
        elif not attributes:
            self.update(f"object {id(thing)}")
        for name, value in [*attributes.items()]:
            if CACHE.search(str(name)):
                continue
            self.update(repr(name))
            self.add(value, where)


def _is_plain_table(rows: list[Any]) -> bool:
    """Whether a list consists of plain values, or of rows of plain values."""
    kinds = set(map(type, rows))
    if kinds and kinds <= {list, tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(rows)))
    return kinds <= SHORT
