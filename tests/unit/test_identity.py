"""The name of a data set changes with anything that its samples may be made of."""

import dataclasses
import enum
import functools
import logging
import os
import sqlite3
import threading
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.numbered_samples import Made

from loaders.cache.fingerprint import fingerprint
from loaders.errors import CacheError, LoaderError
from loaders.sources.datasets import PictureArrays


class Holds:
    """Ten samples that are made of `part`, somehow."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return 0


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Node:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Settings:
    size: int


class Table:
    """As data frames do: what it holds is told by pickling alone."""

    def __init__(self, column: Any) -> None:
        self._blocks = [column]

    def __reduce__(self) -> Any:
        return Table, (self._blocks[0],)


Pair = namedtuple("Pair", "a b")


def middle(count: int, value: Any, dtype: Any = np.float32) -> Any:
    """Zeros but for the one in the middle."""
    array = np.zeros(count, dtype)
    array[count // 2] = value
    return array


def closed_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def compiled(source: str, **known: Any) -> Any:
    """The function `f` of a module of the user's own."""
    module = types.ModuleType("own_module_of_the_test")
    module.__dict__.update(known)
    exec(source, module.__dict__)
    return module.f  # type: ignore[attr-defined]


def module_with(**known: Any) -> types.ModuleType:
    module = types.ModuleType("another_own_module")
    module.__dict__.update(known)
    return module


def own_class(source: str) -> Any:
    return compiled(f"class C:\n    {source}\nf = C()")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda v: v,
    "type of a number": lambda v: [1, 1.0][v],
    "word": lambda v: f"word {v}",
    "bytes": lambda v: b"%d" % v,
    "middle of a list": lambda v: [0] * 5000 + [v] + [0] * 5000,
    "nest": lambda v: {"a": [(1, {"b": (v, None)})]},
    "deep nest": lambda v: functools.reduce(lambda inner, _: [inner], range(30), v),
    "list or tuple": lambda v: [[1], (1,)][v],
    "middle of an array": lambda v: middle(5000, v),
    "middle of a large array": lambda v: middle(9 << 20, v),
    "type of an array": lambda v: np.zeros(4, [np.int32, np.float32][v]),
    "shape of an array": lambda v: np.zeros([(2, 3), (3, 2)][v]),
    "strided array": lambda v: middle(5000, v).reshape(50, 100).T[::2, ::-1],
    "array of objects": lambda v: np.array([None, {"a": v}, "x"], object),
    "structured array": lambda v: np.array([(1, v)], [("a", "i4"), ("b", "f8")]),
    "middle of a tensor": lambda v: torch.from_numpy(middle(5000, v)),
    "bfloat16": lambda v: torch.from_numpy(middle(50, v)).bfloat16(),
    "sparse tensor": lambda v: torch.from_numpy(middle(50, v + 1)).to_sparse(),
    "list of tensors": lambda v: [torch.zeros(2), torch.full((2,), v)],
    "numpy scalar": lambda v: [np.int64(v), np.float32(1)],
    "set": lambda v: {"a", "b", f"c{v}"},
    "set of tuples": lambda v: {("a", 1), ("b", v)},
    "ordered dict": lambda v: OrderedDict(a=v),
    "deque": lambda v: deque([1, v]),
    "namedtuple": lambda v: Pair(1, v),
    "slots": lambda v: Slotted(v),
    "object that holds itself": lambda v: Node(v),
    "enum": lambda v: [Colour.RED, Colour.BLUE][v],
    "dataclass": lambda v: Settings(v),
    "table": lambda v: Table(middle(5000, v)),
    "path": lambda v: Path(f"nowhere/{v}"),
    "partial": lambda v: functools.partial(len, v),
    "module of torch": lambda v: torch.nn.Threshold(0.5, v),
    "weights": lambda v: torch.nn.Parameter(torch.full((2,), float(v))),
    "bound method": lambda v: Settings(v).__eq__,
    "closure": closed_over,
    "closure over an array": lambda v: closed_over(middle(5000, v)),
    "code": lambda v: compiled(f"def f(x): return x + {v}"),
    "operator": lambda v: compiled(f"def f(x): return x {'+-'[v]} 1"),
    "name that is called": lambda v: compiled(f"def f(x): return x.{'ab'[v]}()"),
    "inner function": lambda v: compiled(f"def f(x): return [lambda: {v} for _ in x]"),
    "default": lambda v: compiled(f"def f(x={v}): return x"),
    "keyword default": lambda v: compiled(f"def f(*, x={v}): return x"),
    "global": lambda v: compiled("def f(): return TABLE", TABLE=v),
    "global table": lambda v: compiled("def f(): return TABLE", TABLE={"a": middle(5000, v)}),
    "helper": lambda v: compiled(f"def g(): return {v}\ndef f(): return g()"),
    "helper's helper": lambda v: compiled(
        f"def h(): return {v}\ndef g(): return h()\ndef f(): return g()"
    ),
    "helper in another module": lambda v: compiled(
        "def f(): return helpers.g()", helpers=module_with(g=compiled(f"def f(): return {v}"))
    ),
    "constant in another module": lambda v: compiled(
        "def f(): return helpers.K", helpers=module_with(K=v)
    ),
    "cached function": lambda v: functools.lru_cache(compiled(f"def f(x): return {v}")),
    "method": lambda v: own_class(f"def get(self): return {v}"),
    "class attribute": lambda v: own_class(f"size = {v}"),
    "property": lambda v: own_class(f"p = property(lambda self: {v})"),
    "static method": lambda v: own_class(f"s = staticmethod(lambda: {v})"),
    "base class": lambda v: compiled(
        f"class A:\n    def get(self): return {v}\nclass B(A): pass\nf = B()"
    ),
    "class itself": lambda v: type(own_class(f"size = {v}")),
    "what is in a constant set": lambda v: compiled(f"def f(x): return x in {{'a', 'b{v}'}}"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_what_a_data_set_holds_changes_its_name(change: Any) -> None:
    assert fingerprint(Holds(change(0))) == fingerprint(Holds(change(0)))
    assert fingerprint(Holds(change(0))) != fingerprint(Holds(change(1)))


def test_comments_and_places_are_no_part_of_code() -> None:
    plain = compiled("def f(x): return x + 1")
    moved = compiled("\n\n# what it does\ndef f(x):\n    # adds\n    return x + 1")
    assert fingerprint(Holds(plain)) == fingerprint(Holds(moved))


def test_what_is_neither_data_nor_code_does_not_hinder() -> None:
    log = logging.getLogger("of the user")
    parts = [log, threading.Lock(), threading.RLock(), random_generator(1), np, Colour]
    assert fingerprint(Holds(parts)) == fingerprint(
        Holds([*parts[:3], random_generator(2), *parts[4:]])
    )


def random_generator(seed: int) -> Any:
    return np.random.default_rng(seed)


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held",
    [
        lambda folder: str(folder / "b.csv"),
        lambda folder: folder / "b.csv",
        lambda folder: [str(folder / name) for name in ("a.csv", "b.csv", "c.csv")],
        lambda folder: {"train": [(folder / "b.csv", 1)]},
        lambda folder: np.array([str(folder / "b.csv")], object),
        lambda folder: folder,
        lambda folder: str(folder),
        lambda folder: str(folder.parent),
        lambda folder: np.memmap(folder / "b.csv", np.uint8, "r"),
        lambda folder: np.memmap(folder / "b.csv", np.uint8, "r")[1:].reshape(-1, 1),
        lambda folder: compiled(f"def f(): return open({str(folder / 'b.csv')!r})"),
    ],
    ids=[
        "word", "path", "list", "nest", "objects", "folder", "folder's word", "folder above",
        "mapped", "view", "constant",
    ],
)  # fmt: skip
@pytest.mark.parametrize("change", ["bytes", "time", "inode"])
def test_a_change_of_any_file_that_is_named_changes_the_name(
    held: Any, change: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("a.csv", "b.csv", "c.csv"):
        (folder / name).write_bytes(b"0123456789" * 500)
    before = fingerprint(Holds(held(folder)))
    assert fingerprint(Holds(held(folder))) == before
    path = folder / "b.csv"
    times = path.stat().st_mtime_ns, path.stat().st_mtime_ns
    if change == "bytes":
        path.write_bytes(b"0123456789" * 501)
    elif change == "time":
        os.utime(path, ns=(1, 1))
    else:
        (folder / "new").write_bytes(b"9876543210" * 500)
        os.utime(folder / "new", ns=times)
        (folder / "new").rename(path)
    assert fingerprint(Holds(held(folder))) != before


def test_a_file_that_comes_or_goes_in_a_folder_changes_the_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    names = [fingerprint(Holds(tmp_path))]
    (tmp_path / "deep" / "new").write_bytes(b"")
    names.append(fingerprint(Holds(tmp_path)))
    (tmp_path / "deep" / "new").rename(tmp_path / "deep" / "other")
    names.append(fingerprint(Holds(tmp_path)))
    assert len(set(names)) == 3


def test_the_caches_own_folder_is_no_part_of_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    before = fingerprint(Holds(tmp_path), ignored=tmp_path / "cache")
    (tmp_path / "cache" / "record").write_bytes(b"x")
    assert fingerprint(Holds(tmp_path), ignored=tmp_path / "cache") == before


# ---- what cannot be told ------------------------------------------------------------------------


def test_what_cannot_be_told_is_named_and_a_key_vouches_for_it() -> None:
    with open(os.devnull) as handle, closing(sqlite3.connect(":memory:")) as connection:
        check_what_cannot_be_told(handle, connection)


def check_what_cannot_be_told(handle: Any, connection: Any) -> None:
    cases: list[tuple[Any, str]] = [
        (handle, r"data set\.part \(_io\.TextIOWrapper\)"),
        ({"a": [1, handle]}, r"data set\.part\['a'\]\[1\] \(_io\.TextIOWrapper\)"),
        (Slotted(connection), r"sqlite3\.Connection"),
        (closed_over(connection), r"data set\.part: value \(sqlite3\.Connection\)"),
        (compiled("def f(): return H", H=handle), r"f: global H \(_io\.TextIOWrapper\)"),
        ((number for number in range(3)), r"generator"),
        (torch.zeros(2, device="meta"), r"Tensor without readable bytes"),
    ]
    for part, named in cases:
        with pytest.raises(CacheError, match=f"parts of Holds.*{named}.*Cache\\(key="):
            fingerprint(Holds(part))
        assert len({fingerprint(Holds(part), key) for key in ("a", "a", "b")}) == 2


def test_random_samples_are_refused_a_cache_would_freeze_them() -> None:
    with pytest.raises(CacheError, match="move the randomness to augment"):
        fingerprint(Made(2, lambda _: torch.rand(4)))


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        (Made(0, torch.tensor), "empty"),
        (
            PictureArrays(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(1, np.int64), ("a",)),
            "in memory.*leave the cache off",
        ),
    ],
    ids=["empty", "in memory already"],
)
def test_what_needs_no_cache_is_told_so(dataset: Any, complaint: str) -> None:
    with pytest.raises(LoaderError, match=complaint):
        fingerprint(dataset)
