"""What an object is made of: told piece by piece to a digest, down to the bytes.

    numbers, words, lists of them      their text; a name of a file: that file's state too
    arrays, tensors                    type, shape, bytes; mapped from a file: that file's state
    functions, classes                 their code, and the globals and closures that it reads
    any other object                   its class, and what pickling it would carry

A library is told by its name and version. What pickling refuses (an open file, a database, a
handle) cannot be told. It is listed in `untold` with the way that led there, and its owner decides.
A generator of random numbers is told by its type alone: what it draws is random, or is in the
values already.

1 GB of arrays takes about a second with a CPU that has instructions for SHA-256.
"""

import copyreg
import functools
import hashlib
import itertools
import os
import random
import re
import types
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.identity.file_states import FileStates, FolderTooLarge, may_be_a_file
from loaders.identity.own_code import (
    globals_read,
    imported_files,
    instructions,
    library_of,
    names_in,
    read_from,
    written_in,
)

PLAIN = (bool, int, float, complex, str, bytes, type(None), range, type(...), slice)
CONTAINERS = (list, tuple, dict)
DEEPEST = 8
"""Plain values that are nested deeper are told one by one."""
CACHE = re.compile(r"^_cached?(_|$)|_cache$")
GENERATORS = (
    torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator,
    random.Random,
)  # fmt: skip
LOCKS = ("lock", "RLock")
"""Of the module _thread: no data set is made of them, and none can be pickled."""


class Contents:
    """Tells objects to one digest."""

    def __init__(self, files: FileStates | None = None) -> None:
        self.untold: list[str] = []
        """What cannot be told, each with the way to it."""
        self.files = files or FileStates()
        self._digest = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        self.kept: list[object] = []
        """Told objects stay alive, so that no other one gets their ids."""

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def update(self, part: bytes | str) -> None:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        self._digest.update(b"%d:" % len(data))  # so that no two lists of parts give the same bytes
        self._digest.update(data)

    def tell(self, thing: object, way: str) -> None:
        """`way` says where the thing is, for whoever has to find it."""
        kind = type(thing)
        if (leaves := _plain_leaves(thing)) is not None:
            self.update(f"{kind.__name__} {thing!r}")
            self._tell_files(leaves, alone=kind not in CONTAINERS, way=way)
        elif isinstance(thing, np.ndarray):
            self._tell_array(thing, way)
        elif isinstance(thing, torch.Tensor):
            self._tell_tensor(thing, way)
        elif isinstance(thing, GENERATORS) or _is_lock(kind):
            self.update(_name(kind))
        elif id(thing) in self._numbers:
            self.update(f"again {self._numbers[id(thing)]}")
        else:
            self._numbers[id(thing)] = len(self._numbers)
            self.kept.append(thing)
            self._tell_new(thing, way)

    def tell_file(self, name: str) -> None:
        """The state of a file; it is not read. Raises OSError where there is none."""
        if not (state := self.files.of_file(name)):
            os.stat(name)
            raise IsADirectoryError(name)
        self.update(state)

    def _tell_new(self, thing: Any, way: str) -> None:
        if isinstance(thing, type):
            self._tell_class(thing, way)
        elif isinstance(thing, types.FunctionType):
            self._tell_function(thing, way)
        elif isinstance(thing, types.MethodType):
            self.tell(thing.__func__, way)
            self.tell(thing.__self__, f"{way}.__self__")
        elif isinstance(thing, types.ModuleType):
            self.update(f"module {thing.__name__} {library_of(thing.__name__)}")
        elif isinstance(thing, staticmethod | classmethod):
            self.tell(thing.__func__, way)
        elif isinstance(thing, property):
            self.tell((thing.fget, thing.fset), way)
        elif isinstance(thing, functools.cached_property):
            self.tell(thing.func, way)
        elif isinstance(thing, functools.partial):
            self.tell((thing.func, thing.args, thing.keywords), way)
        elif isinstance(inner := getattr(thing, "__wrapped__", None), types.FunctionType):
            self.tell(inner, way)  # as of functools.lru_cache
        elif type(thing) in CONTAINERS or isinstance(thing, types.MappingProxyType):
            self._tell_container(thing, way)
        elif isinstance(thing, set | frozenset):
            self._tell_set(thing, way)
        elif isinstance(thing, torch.dtype | torch.device | np.dtype | torch.Size):
            self.update(repr(thing))
        elif (parts := _parts_of_a_table(thing)) is not None:
            self.update(_name(type(thing)))
            self.tell(parts, way)
        else:
            self._tell_object(thing, way)

    # ---- plain values and files -----------------------------------------------------------------

    def _tell_files(self, leaves: list[Any], alone: bool, way: str) -> None:
        """The files that words name. A word in a list is one only if it looks like one."""
        for leaf in leaves:
            if isinstance(leaf, PurePath):
                name = os.fspath(leaf)
            elif type(leaf) is str and leaf and (alone or may_be_a_file(leaf)):
                name = leaf
            else:
                continue
            try:
                for state in self.files.of(name):
                    self.update(state)
            except FolderTooLarge:
                self.untold.append(f"{way} (the folder {name} has too many files)")

    def _tell_container(self, thing: Any, way: str) -> None:
        self.update(f"{type(thing).__name__} {len(thing)}")
        if isinstance(thing, dict | types.MappingProxyType):
            for key, value in thing.items():
                self.tell(key, f"{way}[key]")
                self.tell(value, f"{way}[{key!r:.40}]")
        else:
            for number, value in enumerate(thing):
                self.tell(value, f"{way}[{number}]")

    def _tell_set(self, thing: Any, way: str) -> None:
        """Elements in the order of their digests: that of a set differs from run to run."""
        digests: list[str] = []
        for element in thing:
            alone = type(self)(self.files)
            alone.tell(element, way)
            digests.append(alone.hexdigest())
            self.untold += alone.untold
        self.update(f"set {sorted(digests)}")

    # ---- arrays ---------------------------------------------------------------------------------

    def _tell_array(self, array: NDArray[Any], way: str) -> None:
        self.update(f"{array.dtype.descr} {array.shape} {type(array).__name__}")
        if array.dtype.hasobject:
            self.tell(array.tolist(), way)
        elif (mapped := _mapped(array)) is not None:
            begin = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
            self.update(f"{begin} {mapped.offset} {array.strides}")
            self.tell_file(str(mapped.filename))
        else:
            self._tell_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _tell_tensor(self, tensor: torch.Tensor, way: str) -> None:
        self.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}")
        try:
            dense = tensor.detach().cpu()
            if dense.layout is not torch.strided:
                dense = dense.coalesce() if dense.layout is torch.sparse_coo else dense
                parts = ("indices", "values", "crow_indices", "col_indices")
                found = [getattr(dense, p)() for p in parts if _gives(dense, p)]
                for part in found:
                    self._tell_tensor(part, way)
                return
            dense = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
            self._tell_bytes(dense.view(torch.uint8).numpy())
        except (RuntimeError, TypeError, NotImplementedError):
            self.untold.append(f"{way} ({type(tensor).__name__} without bytes of its own)")

    def _tell_bytes(self, data: NDArray[np.uint8]) -> None:
        self.update(hashlib.sha256(data.data).digest())

    # ---- code -----------------------------------------------------------------------------------

    def _tell_class(self, kind: type, way: str) -> None:
        self._tell_name_of_class(kind)
        if library_of(kind.__module__) is None:
            for base in kind.__bases__:
                self.tell(base, way)
            for name, value in written_in(kind).items():
                self.update(name)
                self.tell(value, f"{kind.__qualname__}.{name}")

    def _tell_name_of_class(self, kind: type) -> None:
        self.update(f"class {_name(kind)} {library_of(kind.__module__)}")

    def _tell_function(self, function: types.FunctionType, way: str) -> None:
        self._tell_name_of_function(function)
        self.tell((function.__defaults__, function.__kwdefaults__), way)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # it is not set yet
                continue
            self.tell(held, f"{way}: {name}")
        if library_of(function.__module__) is not None:
            return
        self._tell_code(function)
        names = names_in(function)
        for name, value in globals_read(function).items():
            self.update(name)
            self._tell_global(value, names, f"{function.__qualname__}: global {name}")

    def _tell_name_of_function(self, function: types.FunctionType) -> None:
        library = library_of(function.__module__)
        self.update(f"function {function.__qualname__} {library}")

    def _tell_code(self, function: types.FunctionType) -> None:
        self._tell_instructions(instructions(function.__code__))
        for file in imported_files(function):
            self.tell_file(file)

    def _tell_instructions(self, code: list[Any]) -> None:
        """A constant may name a file, but not a folder: "/" and "." are separators."""
        for part in code:
            if isinstance(part, list):
                self.update("code")
                self._tell_instructions(part)
                continue
            self.update(f"{type(part).__name__} {part!r}")
            if type(part) is str and may_be_a_file(part):
                self.update(self.files.of_file(part))

    def _tell_global(self, value: object, names: list[str], way: str) -> None:
        if not isinstance(value, types.ModuleType) or library_of(value.__name__) is not None:
            self.tell(value, way)
        elif id(value) not in self._numbers:
            self.tell(value, way)
            for name, read in read_from(value, names).items():
                self.update(name)
                self._tell_global(read, names, f"{way}.{name}")

    # ---- any other object -----------------------------------------------------------------------

    def _tell_object(self, thing: object, way: str) -> None:
        kind = type(thing)
        if isinstance(thing, types.BuiltinFunctionType | types.BuiltinMethodType):
            held = thing.__self__
            self.update(f"builtin {thing.__qualname__} {thing.__module__}")
            if held is not None and not isinstance(held, types.ModuleType):
                self.tell(held, way)
            return
        self.tell(kind, way)
        try:
            registered = copyreg.dispatch_table.get(kind)
            reduced = registered(thing) if registered else thing.__reduce_ex__(4)
        except RecursionError:
            raise
        except Exception:
            self.untold.append(f"{way} ({kind.__module__}.{kind.__qualname__})")
            return
        if isinstance(reduced, str):
            self.update(reduced)
            return
        self.kept.append(reduced)
        make, arguments, *rest = reduced
        self.tell(make, way)
        for number, argument in enumerate(arguments):
            self.tell(argument, f"{way}({number})")
        for part in itertools.chain.from_iterable(map(_states, rest)):
            if isinstance(part, dict):
                part = _without_caches(part) if library_of(kind.__module__) else part
                self.update(f"state {len(part)}")
                for name, value in part.items():
                    self.update(repr(name))
                    self.tell(value, f"{way}.{name}")
            elif part is not None:
                self.tell(_listed(part), way)


def _parts_of_a_table(thing: Any) -> list[Any] | None:
    """What is in a table, a column or an index of pandas. (Pickled, they carry caches, too.)"""
    if str(type(thing).__module__).partition(".")[0] != "pandas" or not hasattr(thing, "to_numpy"):
        return None
    if hasattr(thing, "columns"):
        return [thing.columns, thing.index, *(thing.iloc[:, n] for n in range(thing.shape[1]))]
    names = list(getattr(thing, "names", [getattr(thing, "name", None)]))
    return [str(thing.dtype), names, getattr(thing, "index", None), thing.to_numpy()]


def _plain_leaves(thing: object) -> list[Any] | None:
    """The values in nested lists, tuples and dicts. None: some are not plain."""
    leaves: list[Any] = []
    level = [thing]
    for _ in range(DEEPEST):
        kinds = set(map(type, level))
        inner = kinds & {*CONTAINERS}
        if not all(_is_plain(kind) for kind in kinds - inner):
            return None
        leaves += [each for each in level if type(each) not in inner] if inner else level
        if not inner:
            return leaves
        level = list(
            itertools.chain.from_iterable(
                (*each.keys(), *each.values()) if isinstance(each, dict) else cast(list[Any], each)
                for each in level
                if type(each) in inner
            )
        )
    return None


def _is_lock(kind: type) -> bool:
    return kind.__module__ == "_thread" and kind.__name__ in LOCKS


def _is_plain(kind: type) -> bool:
    if kind in PLAIN or (issubclass(kind, PurePath) and kind.__module__.startswith("pathlib")):
        return True
    return issubclass(kind, np.generic) and not issubclass(kind, np.void | np.object_)


def _mapped(array: Any) -> "np.memmap[Any, Any] | None":
    """The mapped file in which an array lies. None: it lies in memory."""
    found = None
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and getattr(array, "filename", None) is not None:
            found = array
        array = array.base
    return found if found is not None and Path(str(found.filename)).is_file() else None


def _without_caches(state: dict[Any, Any]) -> dict[Any, Any]:
    """The state of a library's object without what the library remembers of its own results."""
    return {n: v for n, v in state.items() if not (isinstance(n, str) and CACHE.search(n))}


def _gives(tensor: torch.Tensor, part: str) -> bool:
    try:
        return getattr(tensor, part)() is not None
    except RuntimeError:
        return False


def _states(part: Any) -> tuple[Any, ...]:
    """The state of a pickled object: of its attributes, and of its slots where it has some."""
    both = isinstance(part, tuple) and len(part) == 2
    return part if both and all(isinstance(p, dict | None) for p in part) else (part,)


def _listed(part: Any) -> Any:
    """What is left of a pickled object: an iterator over its elements, or its state."""
    return list(part) if hasattr(part, "__next__") else part


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
