"""The name of a data set's decoded cache. It changes when the decoded samples would change.

    the data set       its class's code, its attributes, arrays and tables to the last byte, its
                       transforms (`loaders.identity`)
    files              size, time of change and inode of every file and folder that it names
    our picture sets   paths relative to their common folder, so that a folder may be moved
    all of them        the first and the last sample, decoded: their leaves' types, shapes, bytes

A part that cannot be hashed is refused by name, unless the user gives `Cache(key=)` for it. The
name does not cover what code reads from outside the data set (the environment, the network, a file
that no attribute names), so a few samples of a cache are read again and compared (`verify`).
"""

import importlib.metadata
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loaders.adopting.native_folder import NativeFolder
from loaders.cache.cache import DecodedCache
from loaders.cache.cache_records import Packed, RecordLayouts, pack
from loaders.errors import CacheError
from loaders.identity.contents import ContentDigest
from loaders.identity.file_states import FileStates
from loaders.pixels.jpegs import DecodeCounts, decodes_jpegs
from loaders.slots.leaves import as_stored, as_tensor, leaves_of, structure_of
from loaders.sources.archives import PictureTar
from loaders.sources.datasets import PictureArrays, PictureFiles

log = logging.getLogger(__name__)

FORMAT = 2
"""Raise it when the same files or the same code of ours would decode to other pixels."""
VERIFIED = 8
"""This many samples of an existing cache are compared with what the data set gives."""


def fingerprint(dataset: Any, key: str | None = None, ignored: Path | None = None) -> str:
    """The name, 32 hexadecimal digits. The first sample is decoded twice, the last one once. `key`
    stands for the parts that cannot be hashed. The folder `ignored` is left out."""
    if len(dataset) == 0:
        raise CacheError("the data set is empty: there is nothing to cache")
    contents = DataSetDigest(FileStates(ignored))
    decoder = f"pillow {importlib.metadata.version('pillow')} {decodes_jpegs()}"
    contents.update(f"{FORMAT} {decoder} {len(dataset)} {key!r}")
    try:
        contents.add(dataset, "data set")
    except RecursionError:
        contents.unhashable.append("data set (its parts are nested too deeply)")
    except OSError as error:
        raise CacheError(
            f"cannot look at the file {error.filename}: {error}; repair the data set"
        ) from error
    if contents.unhashable and key is None:
        parts = ", ".join(contents.unhashable[:3])
        if (more := len(contents.unhashable) - 3) > 0:
            parts += f" and {more} more"
        raise CacheError(
            f"nobody can tell whether these parts of {type(dataset).__name__} are those of an"
            f" earlier run, so a cache on disk could serve old samples: {parts};"
            ' give Cache(key="..."), a word that you change whenever they change, or use'
            ' Cache("ram", ...)'
        )
    first = _sample_parts(dataset[0])
    if _sample_parts(dataset[0]) != first:
        raise CacheError(
            f"sample 0 of {type(dataset).__name__} was different when it was decoded again, and a"
            " cache would freeze that; leave the cache off, or move the randomness to augment"
        )
    for part in (*first, *_sample_parts(dataset[len(dataset) - 1])):
        contents.update(part)
    return contents.hexdigest()


def verify(cache: DecodedCache, dataset: Any, where: Path) -> None:
    """Refuse a cache whose samples are not those of the data set. A few of them are compared."""
    kept = np.array(sorted(cache.ids()))
    if len(kept):
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, VERIFIED).astype(int))]
    for sample_id in kept.tolist():
        cached = cache.read(sample_id)
        if cached is None or sample_id >= len(dataset):
            continue
        try:
            sample = dataset[sample_id]
        except Exception as error:  # a later read of this sample raises it
            log.debug("sample %d of the cache is not compared: %s", sample_id, error)
            continue
        fresh = pack([as_stored(leaf) for leaf in leaves_of(sample)], RecordLayouts())
        if not _are_equal(pack(cached, RecordLayouts()), fresh):
            raise CacheError(
                f"sample {sample_id} of the decoded cache {where} is not what"
                f" {type(dataset).__name__} gives for it now: the data changed in a way that cannot"
                " be noticed, or decoding is random; delete that folder, and give Cache another key"
                " whenever the data change"
            )


class DataSetDigest(ContentDigest):
    """A digest that takes only those attributes of picture sources that decide what is decoded."""

    def _add_new(self, thing: Any, where: str) -> None:
        if isinstance(thing, PictureArrays):
            raise CacheError(
                "the pictures of PictureArrays lie decoded in memory, so a cache would be a second"
                " copy: leave the cache off"
            )
        if isinstance(thing, PictureFiles):
            self.update("PictureFiles")
            self.add((thing.classes, thing.decoder), where)
            self._add_labelled(thing.paths, thing.labels)
        elif isinstance(thing, NativeFolder):
            self.add(thing.folder, where)  # the pixels are the same
        elif isinstance(thing, DecodeCounts):
            return  # counts change no sample
        elif isinstance(thing, PictureTar):
            self.update("PictureTar")
            self.add((thing.classes, thing.decoder), where)
            self._add_labelled([thing.path], [list(thing.labels)])
        elif _is_folder_of_torchvision(thing):
            # Its `root` is left out: other data sets may lie there, too.
            self.update(f"{type(thing).__module__}.{type(thing).__qualname__}")
            for name in ("classes", "loader", "transform", "target_transform", "transforms"):
                self.add(getattr(thing, name, None), f"{where}.{name}")
            self._add_labelled([s[0] for s in thing.samples], [s[1] for s in thing.samples])
        else:
            super()._add_new(thing, where)

    def _add_labelled(
        self, paths: Sequence[str | os.PathLike[str]], labels: Iterable[object]
    ) -> None:
        names = [os.fspath(path) for path in paths]
        # All names share what the first and the last name in alphabetical order share.
        low, high = os.path.dirname(min(names)), os.path.dirname(max(names))
        same_root = os.path.isabs(low) == os.path.isabs(high)
        prefix = len(os.path.commonpath([low, high])) if same_root else 0
        for name, label in zip(names, labels, strict=True):
            self.update(f"{name[prefix:]}\0{label!r}")
            self.add_file(name)


def _is_folder_of_torchvision(thing: Any) -> bool:
    """Whether torchvision's own code reads the files in `samples`, and nothing else."""
    samples = getattr(thing, "samples", None)
    is_theirs = str(type(thing).__module__).startswith("torchvision.datasets.")
    if not is_theirs or not isinstance(samples, list | tuple):
        return False
    pairs = all(isinstance(each, tuple) and len(each) == 2 for each in samples)
    return pairs and all(isinstance(each[0], str | os.PathLike) for each in samples)


def _are_equal(first: Packed | None, second: Packed | None) -> bool:
    if first is None or second is None:
        return first is second
    if (first.layout.text, repr(first.values)) != (second.layout.text, repr(second.values)):
        return False
    return all(map(np.array_equal, first.rows, second.rows))


def _sample_parts(sample: Any) -> list[bytes | str]:
    """A decoded sample as parts of the name."""
    parts: list[bytes | str] = [repr(structure_of(sample))]
    for leaf in leaves_of(sample):
        packed = pack([as_tensor(leaf)], RecordLayouts())
        if packed is None:
            parts.append(f"{type(leaf).__module__}.{type(leaf).__qualname__}")
        else:
            parts += [packed.layout.text, repr(packed.values), *(r.tobytes() for r in packed.rows)]
    return parts
