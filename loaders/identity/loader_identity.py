"""Which data and sampler a saved loader state belongs to, as digests that are cheap to compute.

    names, labels   of pictures in files: names relative to their common folder, all labels
    rows            of a Subset: which samples of the data set inside
    columns         of other data sets: the attributes with one entry for each sample
    sampler         its class, and the arguments that it keeps
    order           in the middle of a pass: the digest of all ids that the sampler drew for it

No file is looked at, no sample is read. A part that only one of two loaders has is not compared: a
folder may be moved, packed into a tar, or decoded by another backend. Nor is code.
"""

import hashlib
import inspect
import logging
import os
from collections.abc import Sequence
from itertools import takewhile
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Sampler, Subset, TensorDataset

from loaders.errors import StateError
from loaders.identity.contents import ContentDigest
from loaders.sources.archives import PictureTar
from loaders.sources.datasets import PictureFiles
from loaders.sources.samplers import COUNT_NAMES, RANK_NAMES

log = logging.getLogger(__name__)

WHOLE_BYTES = 64 << 20
"""Arrays up to this size are hashed in full."""
BLOCKS, BLOCK = 256, 1 << 16
NOT_COMPARED = frozenset({"self", "generator", "dataset", "data_source", *RANK_NAMES, *COUNT_NAMES})
"""Arguments of samplers that differ between ranks, or that other parts describe."""
TO_CONTINUE = "to go on with what is here nevertheless, take 'identity' out of the saved state"


class LoaderIdentity:
    """The identity of one loader. Make it before any sample is read: a data set may note what it
    reads in an attribute with one entry for each sample."""

    def __init__(self, dataset: Any, sampler: Any) -> None:
        self._sampler = sampler
        self._parts = data_digests(dataset) | sampler_digests(sampler)
        self._order = ""
        self._expected = ""
        self._warned = False

    def state(self, in_a_pass: bool) -> dict[str, str]:
        order = self._expected or self._order
        return self._parts | ({"order": order} if in_a_pass and order else {})

    def check(self, saved: dict[str, str] | None) -> None:
        """Refuse the state of a loader of other data, or with another sampler."""
        if saved is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "the saved loader state does not say of which data and sampler it is, so it is"
                    " taken as it is"
                )
            return
        here = self.state(in_a_pass=False)
        for part in sorted(saved.keys() & here.keys() - {"order"}):
            if saved[part] != here[part]:
                raise StateError(_mismatch_message(part, saved[part], here[part]))

    def expect(self, saved: dict[str, str] | None) -> None:
        """The next pass must have the order of a saved state. None: any order will do."""
        self._expected, self._order = (saved or {}).get("order", ""), ""

    def continue_from(self, before: "LoaderIdentity") -> None:
        """Expect the order that `before` did. It belongs to the same loader with other data."""
        self._order, self._expected = before._order, before._expected

    def begin(self, order: str) -> None:
        """A pass begins in this order. It is refused if a saved state expects another one."""
        expected, self._expected, self._order = self._expected, "", order
        # Ranks that could not compare their orders name their own: "rank:order".
        of_two_ranks = expected.partition(":")[0] != order.partition(":")[0] and ":" in order
        if expected and order and expected != order and not of_two_ranks:
            raise StateError(
                f"the sampler {type(self._sampler).__name__} draws another order for this pass than"
                " in the run that saved the state: give a sampler with the same arguments, whose"
                f" order is a function of (seed, pass); {TO_CONTINUE}"
            )


def _mismatch_message(part: str, saved: str, here: str) -> str:
    what = {
        "names": "the names of the pictures are others",
        "labels": "the labels are others",
        "rows": "the subset is made of other samples",
        "columns": "the data set holds other values",
        "parts": "the data sets that it is made of are others",
        "sampler": f"the sampler was {saved}, here it is {here}",
        "sampler arguments": "the sampler has other arguments",
    }[part]
    return (
        f"the saved loader state is one of other data or of another order: {what}; make the loader"
        f" with the data and the sampler of that run; {TO_CONTINUE}"
    )


def data_digests(dataset: Any) -> dict[str, str]:
    """Short digests of what is cheap to hash in a data set."""
    if isinstance(dataset, Subset):
        return data_digests(dataset.dataset) | {"rows": _digest(list(map(int, dataset.indices)))}
    if isinstance(dataset, ConcatDataset):
        return {"parts": _digest([sorted(data_digests(part).items()) for part in dataset.datasets])}
    files = getattr(dataset, "files", dataset)  # of another backend
    if isinstance(files, PictureFiles):
        return {"names": _digest_names(files.paths), "labels": _digest(list(files.labels))}
    if isinstance(files, PictureTar):
        names = [member.name for member in files.members]
        return {"names": _digest_names(names), "labels": _digest(list(files.labels))}
    samples = getattr(dataset, "samples", None)
    if isinstance(samples, list) and samples and isinstance(samples[0], tuple):
        paths, labels = [each[0] for each in samples], [each[-1] for each in samples]
        if all(isinstance(path, str | os.PathLike) for path in paths):
            return {"names": _digest_names(paths), "labels": _digest(labels)}
    columns = _digest_columns(dataset)
    return {"columns": _digest(columns)} if columns else {}


def _digest_columns(dataset: Any) -> list[Any]:
    """The digests of the attributes that have an entry for each sample."""
    if isinstance(dataset, TensorDataset):
        return [_digest(tensor) for tensor in dataset.tensors]
    if not hasattr(dataset, "__len__"):
        return []
    kinds = (list, tuple, np.ndarray, torch.Tensor)
    columns: list[Any] = []
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        is_column = isinstance(value, kinds) or type(value).__module__.startswith("pandas")
        if not is_column or "cache" in name or not _has_rows(value, len(dataset)):
            continue
        if isinstance(value, list | tuple) and any(each is None for each in value):
            continue  # it is filled when samples are read
        paths = isinstance(value, list) and all(isinstance(v, str | os.PathLike) for v in value)
        if digest := _digest_names(cast(list[str], value)) if paths else _digest(value):
            columns.append((name, digest))
    return columns


def _has_rows(value: Any, rows: int) -> bool:
    try:
        return len(value) == rows
    except TypeError:  # an array without dimensions
        return False


def _digest_names(paths: Sequence[str | os.PathLike[str]]) -> str:
    """The digest of the names relative to their common folder."""
    names = [os.fspath(path).replace(os.sep, "/").removeprefix("./") for path in paths]
    low, high = min(names).split("/")[:-1], max(names).split("/")[:-1]
    common = takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    prefix = len("".join(f"{folder}/" for folder, _ in common))
    return _digest([name[prefix:] for name in names])


def sampler_digests(sampler: Any) -> dict[str, str]:
    name = "none" if sampler is None else type(sampler).__name__
    if isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        return {"sampler": name, "sampler arguments": _digest(sampler)}
    arguments: list[Any] = []
    for argument, value in _kept_arguments(sampler).items():
        if isinstance(value, Sampler):
            arguments.append((argument, sorted(sampler_digests(value).items())))
        elif digest := _digest(value):
            arguments.append((argument, digest))
    return {"sampler": name} | ({"sampler arguments": _digest(arguments)} if arguments else {})


def _kept_arguments(sampler: Any) -> dict[str, Any]:
    """The arguments of a sampler that it keeps as attributes of the same names."""
    try:
        names = inspect.signature(type(sampler).__init__).parameters
    except (TypeError, ValueError):
        return {}
    kept = getattr(sampler, "__dict__", {})
    return {name: kept[name] for name in names if name in kept and name not in NOT_COMPARED}


def _digest(thing: Any) -> str:
    """16 hexadecimal digits. Empty: it cannot be hashed."""
    contents = QuickDigest()
    try:
        contents.add(thing, "it")
    except (RecursionError, OSError):
        return ""
    return "" if contents.unhashable else contents.hexdigest()[:16]


class QuickDigest(ContentDigest):
    """A digest without files and code, and with some blocks of large arrays."""

    def _add_named_files(self, leaves: list[Any], single: bool, where: str) -> None: ...

    def add_file(self, name: str) -> None: ...

    def _add_object(self, thing: object, where: str) -> None:
        self.unhashable.append(where)  # what it holds may change while it is used

    def _add_class(self, kind: type, where: str) -> None:
        self.unhashable.append(where)

    def _add_function(self, function: FunctionType, where: str) -> None:
        self.unhashable.append(where)

    def _add_array(self, array: NDArray[Any], where: str) -> None:
        if array.dtype.hasobject:
            super()._add_array(array, where)
            return
        if not array.flags.c_contiguous and array.nbytes > WHOLE_BYTES:
            array = array[:: max(1, len(array) // BLOCKS)]
        self.update(f"{array.dtype.descr} {array.shape}")
        self._add_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _add_bytes(self, data: NDArray[np.uint8]) -> None:
        if len(data) <= WHOLE_BYTES:
            super()._add_bytes(data)
            return
        digest = hashlib.sha256()
        for begin in np.linspace(0, len(data) - BLOCK, BLOCKS).astype(np.int64).tolist():
            digest.update(data[begin : begin + BLOCK].data)
        self.update(digest.digest())
