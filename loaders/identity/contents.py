"""A digest of everything that an object is made of, down to the bytes.

    numbers, strings, lists of them    their text; a file name: that file's state too
    arrays, tensors                    type, shape, bytes; mapped from a file: that file's state
    functions, classes                 their code, and the globals and closures that it reads
    any other object                   its class, and what pickling it would store

A library counts by its name and version, a generator of random numbers by its type. An object that
cannot be pickled is listed in `unhashable` with its place, and the caller decides.
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

from loaders.identity.file_states import FileStates, FolderTooLarge, may_name_a_file
from loaders.identity.own_code import (
    globals_read,
    imported_files,
    instructions,
    library_of,
    members_of,
    names_used,
)

PLAIN = (bool, int, float, complex, str, bytes, type(None), range, type(...), slice)
CONTAINERS = (list, tuple, dict)
DEEPEST = 8
"""Plain values that are nested deeper are added one by one."""
CACHE = re.compile(r"^_cached?(_|$)|_cache$")
GENERATORS = (
    torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator,
    random.Random,
)  # fmt: skip
LOCKS = ("lock", "RLock")
"""Classes of the module _thread. They hold no data, and cannot be pickled."""


class ContentDigest:
    """One digest, to which objects are added."""

    def __init__(self, files: FileStates | None = None) -> None:
        self.unhashable: list[str] = []
        """The places of all objects that cannot be hashed."""
        self.files = files or FileStates()
        self._digest = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        self.kept: list[object] = []
        """Added objects stay alive, so that no other object gets their ids."""

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def update(self, part: bytes | str) -> None:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        self._digest.update(b"%d:" % len(data))  # so that no two lists of parts give the same bytes
        self._digest.update(data)

    def add(self, thing: object, where: str) -> None:
        """`where` names the place of the thing in messages."""
        kind = type(thing)
        if (leaves := _plain_leaves(thing)) is not None:
            self.update(f"{kind.__name__} {thing!r}")
            self._add_named_files(leaves, single=kind not in CONTAINERS, where=where)
        elif isinstance(thing, np.ndarray):
            self._add_array(thing, where)
        elif isinstance(thing, torch.Tensor):
            self._add_tensor(thing, where)
        elif isinstance(thing, GENERATORS) or (
            kind.__module__ == "_thread" and kind.__name__ in LOCKS
        ):
            self.update(_class_name(kind))
        elif id(thing) in self._numbers:
            self.update(f"again {self._numbers[id(thing)]}")
        else:
            self._numbers[id(thing)] = len(self._numbers)
            self.kept.append(thing)
            self._add_new(thing, where)

    def add_file(self, name: str) -> None:
        """Add the state of a file, which is not read. OSError: there is no such file."""
        if not (state := self.files.file_state(name)):
            os.stat(name)
            raise IsADirectoryError(name)
        self.update(state)

    def _add_new(self, thing: Any, where: str) -> None:
        if isinstance(thing, type):
            self._add_class(thing, where)
        elif isinstance(thing, types.FunctionType):
            self._add_function(thing, where)
        elif isinstance(thing, types.MethodType):
            self.add(thing.__func__, where)
            self.add(thing.__self__, f"{where}.__self__")
        elif isinstance(thing, types.ModuleType):
            self.update(f"module {thing.__name__} {library_of(thing.__name__)}")
        elif isinstance(thing, staticmethod | classmethod):
            self.add(thing.__func__, where)
        elif isinstance(thing, property):
            self.add((thing.fget, thing.fset), where)
        elif isinstance(thing, functools.cached_property):
            self.add(thing.func, where)
        elif isinstance(thing, functools.partial):
            self.add((thing.func, thing.args, thing.keywords), where)
        elif isinstance(inner := getattr(thing, "__wrapped__", None), types.FunctionType):
            self.add(inner, where)  # functools.lru_cache, for example
        elif type(thing) in CONTAINERS or isinstance(thing, types.MappingProxyType):
            self._add_container(thing, where)
        elif isinstance(thing, set | frozenset):
            self._add_set(thing, where)
        elif isinstance(thing, torch.dtype | torch.device | np.dtype | torch.Size):
            self.update(repr(thing))
        elif (parts := _pandas_parts(thing)) is not None:
            self.update(_class_name(type(thing)))
            self.add(parts, where)
        else:
            self._add_object(thing, where)

    def _add_named_files(self, leaves: list[Any], single: bool, where: str) -> None:
        """Add the files that strings name. A string in a list must look like a file name."""
        for leaf in leaves:
            if isinstance(leaf, PurePath):
                name = os.fspath(leaf)
            elif type(leaf) is str and leaf and (single or may_name_a_file(leaf)):
                name = leaf
            else:
                continue
            try:
                for state in self.files.file_states(name):
                    self.update(state)
            except FolderTooLarge:
                self.unhashable.append(f"{where} (the folder {name} has too many files)")

    def _add_container(self, thing: Any, where: str) -> None:
        self.update(f"{type(thing).__name__} {len(thing)}")
        if isinstance(thing, dict | types.MappingProxyType):
            for key, value in thing.items():
                self.add(key, f"{where}[key]")
                self.add(value, f"{where}[{key!r:.40}]")
        else:
            for number, value in enumerate(thing):
                self.add(value, f"{where}[{number}]")

    def _add_set(self, thing: Any, where: str) -> None:
        """Add the elements in the order of their digests, which is the same in every run."""
        digests: list[str] = []
        for element in thing:
            contents = type(self)(self.files)
            contents.add(element, where)
            digests.append(contents.hexdigest())
            self.unhashable += contents.unhashable
        self.update(f"set {sorted(digests)}")

    def _add_array(self, array: NDArray[Any], where: str) -> None:
        self.update(f"{array.dtype.descr} {array.shape} {type(array).__name__}")
        if array.dtype.hasobject:
            self.add(array.tolist(), where)
        elif (mapped := _file_mapping(array)) is not None:
            begin = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
            self.update(f"{begin} {mapped.offset} {array.strides}")
            self.add_file(str(mapped.filename))
        else:
            self._add_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _add_tensor(self, tensor: torch.Tensor, where: str) -> None:
        self.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}")
        try:
            dense = tensor.detach().cpu()
            if dense.layout is not torch.strided:
                for part in _sparse_parts(dense):
                    self._add_tensor(part, where)
                return
            dense = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
            self._add_bytes(dense.view(torch.uint8).numpy())
        except (RuntimeError, TypeError, NotImplementedError):
            self.unhashable.append(f"{where} ({type(tensor).__name__} without readable bytes)")

    def _add_bytes(self, data: NDArray[np.uint8]) -> None:
        self.update(hashlib.sha256(data.data).digest())

    def _add_class(self, kind: type, where: str) -> None:
        self._add_class_name(kind)
        if library_of(kind.__module__) is None:
            for base in kind.__bases__:
                self.add(base, where)
            for name, value in members_of(kind).items():
                self.update(name)
                self.add(value, f"{kind.__qualname__}.{name}")

    def _add_class_name(self, kind: type) -> None:
        self.update(f"class {_class_name(kind)} {library_of(kind.__module__)}")

    def _add_function(self, function: types.FunctionType, where: str) -> None:
        self._add_function_name(function)
        self.add((function.__defaults__, function.__kwdefaults__), where)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # it is not set yet
                continue
            self.add(value, f"{where}: {name}")
        if library_of(function.__module__) is not None:
            return
        self._add_code(function)
        names = names_used(function)
        for name, value in globals_read(function).items():
            self.update(name)
            self._add_global(value, names, f"{function.__qualname__}: global {name}")

    def _add_function_name(self, function: types.FunctionType) -> None:
        library = library_of(function.__module__)
        self.update(f"function {function.__qualname__} {library}")

    def _add_code(self, function: types.FunctionType) -> None:
        self._add_instructions(instructions(function.__code__))
        for file in imported_files(function):
            self.add_file(file)

    def _add_instructions(self, code: list[Any]) -> None:
        """Constants that name files count with those files, but "/" and "." are separators."""
        for part in code:
            if isinstance(part, list):
                self.update("code")
                self._add_instructions(part)
                continue
            self.update(f"{type(part).__name__} {part!r}")
            if type(part) is str and may_name_a_file(part):
                self.update(self.files.file_state(part))

    def _add_global(self, value: object, names: list[str], where: str) -> None:
        if not isinstance(value, types.ModuleType) or library_of(value.__name__) is not None:
            self.add(value, where)
        elif id(value) not in self._numbers:
            self.add(value, where)
            for name in names:
                if name in vars(value):
                    self.update(name)
                    self._add_global(vars(value)[name], names, f"{where}.{name}")

    def _add_object(self, thing: object, where: str) -> None:
        kind = type(thing)
        if isinstance(thing, types.BuiltinFunctionType | types.BuiltinMethodType):
            owner = thing.__self__
            self.update(f"builtin {thing.__qualname__} {thing.__module__}")
            if owner is not None and not isinstance(owner, types.ModuleType):
                self.add(owner, where)
            return
        self.add(kind, where)
        try:
            registered = copyreg.dispatch_table.get(kind)
            reduced = registered(thing) if registered else thing.__reduce_ex__(4)
        except RecursionError:
            raise
        except Exception:
            self.unhashable.append(f"{where} ({kind.__module__}.{kind.__qualname__})")
            return
        if isinstance(reduced, str):
            self.update(reduced)
            return
        self.kept.append(reduced)
        make, arguments, *rest = reduced
        self.add(make, where)
        for number, argument in enumerate(arguments):
            self.add(argument, f"{where}({number})")
        for part in itertools.chain.from_iterable(map(_states, rest)):
            if isinstance(part, dict):
                if library_of(kind.__module__):  # what a library caches of its own results
                    part = {n: v for n, v in part.items() if not CACHE.search(str(n))}
                self.update(f"state {len(part)}")
                for name, value in part.items():
                    self.update(repr(name))
                    self.add(value, f"{where}.{name}")
            elif part is not None:
                self.add(list(part) if hasattr(part, "__next__") else part, where)


def _pandas_parts(thing: Any) -> list[Any] | None:
    """The values in a table, column or index of pandas. (Pickling stores caches, too.)"""
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


def _is_plain(kind: type) -> bool:
    if kind in PLAIN or (issubclass(kind, PurePath) and kind.__module__.startswith("pathlib")):
        return True
    return issubclass(kind, np.generic) and not issubclass(kind, np.void | np.object_)


def _file_mapping(array: Any) -> "np.memmap[Any, Any] | None":
    """The mapped file that holds an array. None: it is in memory."""
    mapping = None
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and getattr(array, "filename", None) is not None:
            mapping = array
        array = array.base
    return mapping if mapping is not None and Path(str(mapping.filename)).is_file() else None


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]


def _states(part: Any) -> tuple[Any, ...]:
    """The state of a pickled object: its attributes, and its slots if it has some."""
    both = isinstance(part, tuple) and len(part) == 2
    return part if both and all(isinstance(p, dict | None) for p in part) else (part,)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
