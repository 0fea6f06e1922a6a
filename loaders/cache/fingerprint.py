"""The name of a data set for a decoded cache. It changes when the decoded samples would.

    pictures in files   paths below their common folder, sizes, times of change, labels, the decoder
    a Subset            the data set inside, and which of its samples
    any other           its class, its length, and its transforms as they print themselves
    all of them         the first and the last sample, decoded: their leaves' types, shapes, bytes

The name does not notice: a file that was rewritten with the same size and time of change; in a data
set that is not made of files (it has no `samples`, which torchvision's folders have), any change
between the first and the last sample; a change inside a transform that prints only its name, if it
changes neither of these two samples. Delete the cache in such a case.

Finding the name looks at every file once a run. That takes about 4 s for 1.3 million files on a
local disk whose folders were read before, and minutes on a cold or remote disk. So let one rank
find the name and give it to the others.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from loaders.cache.cache_records import RecordLayouts, pack
from loaders.errors import CacheError
from loaders.slots.leaves import as_tensor, leaves_of, structure_of
from loaders.sources.archives import PictureTar
from loaders.sources.datasets import PictureArrays, PictureFiles

# Objects without a __repr__ print their address, which differs from run to run.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
TRANSFORMS = ("transform", "target_transform", "transforms", "loader")


def fingerprint(dataset: Any) -> str:  # map-style: len() and [i], as ReuseLoader takes it
    """The name, 32 hexadecimal digits. It decodes the first sample (twice) and the last one."""
    if len(dataset) == 0:
        raise CacheError("the data set is empty: there is nothing to cache")
    digest = hashlib.blake2b(digest_size=16)
    _tell_source(digest, dataset)
    first = _leaves(dataset[0])
    if _leaves(dataset[0]) != first:
        raise CacheError(
            f"sample 0 of {type(dataset).__name__} was different when it was decoded again, so its"
            " decoding is random, and a cache would freeze that; leave the cache off, or move the"
            " randomness to augment"
        )
    for part in (*first, *_leaves(dataset[len(dataset) - 1])):
        _tell(digest, part)
    return digest.hexdigest()


def _tell(digest: "hashlib.blake2b", part: bytes | str) -> None:
    data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
    digest.update(b"%d:" % len(data))  # so that no two lists of parts give the same bytes
    digest.update(data)


def _tell_source(digest: "hashlib.blake2b", dataset: Any) -> None:
    from torch.utils.data import Subset

    kind = type(dataset)
    _tell(digest, f"{kind.__module__}.{kind.__qualname__} {len(dataset)}")
    if isinstance(dataset, PictureArrays):
        raise CacheError(
            "the pictures of PictureArrays lie decoded in memory, so a cache would be a second"
            " copy: leave the cache off"
        )
    if isinstance(dataset, Subset):
        _tell(digest, repr([int(index) for index in dataset.indices]))
        _tell_source(digest, dataset.dataset)
    elif isinstance(dataset, PictureFiles):
        _tell(digest, repr(dataset.classes))
        _tell(digest, _printed(dataset.decoder))
        _tell_files(digest, dataset.paths, dataset.labels)
    elif isinstance(dataset, PictureTar):
        _tell(digest, repr(dataset.classes))
        _tell(digest, _printed(dataset.decoder))
        _tell_files(digest, [dataset.path], [dataset.labels])
    else:
        _tell_generic(digest, dataset)


def _tell_generic(digest: "hashlib.blake2b", dataset: Any) -> None:
    if dataclasses.is_dataclass(dataset):
        _tell(digest, _printed(dataset))
    for name in TRANSFORMS:
        _tell(digest, f"{name} {_printed(getattr(dataset, name, None))}")
    samples = getattr(dataset, "samples", None)
    if isinstance(samples, list | tuple) and all(_is_labelled_path(s) for s in samples):
        _tell_files(digest, [path for path, _ in samples], [label for _, label in samples])


def _tell_files(
    digest: "hashlib.blake2b", paths: Sequence[str | os.PathLike[str]], labels: Iterable[object]
) -> None:
    names = [os.fspath(path) for path in paths]
    # All names share what the first and the last name in alphabetical order share.
    low, high = os.path.dirname(min(names)), os.path.dirname(max(names))
    same_root = os.path.isabs(low) == os.path.isabs(high)
    below = len(os.path.commonpath([low, high])) if same_root else 0
    for name, label in zip(names, labels, strict=True):
        try:
            found = os.stat(name)
        except OSError as error:
            raise CacheError(
                f"cannot look at the file {name}: {error}; repair the data set"
            ) from error
        _tell(digest, f"{name[below:]}\0{found.st_size}\0{found.st_mtime_ns}\0{label!r}")


def _is_labelled_path(sample: object) -> bool:
    if not isinstance(sample, tuple) or len(sample) != 2:
        return False
    return isinstance(sample[0], str | os.PathLike)


def _leaves(sample: Any) -> list[bytes | str]:
    """Everything about a decoded sample, as parts of the name."""
    leaves, structure = leaves_of(sample), structure_of(sample)
    told: list[bytes | str] = [repr(structure)]
    for leaf in leaves:
        packed = pack([as_tensor(leaf)], RecordLayouts())
        if packed is None:
            told.append(_printed(leaf))
        else:
            told += [packed.layout.text, repr(packed.values), *(r.tobytes() for r in packed.rows)]
    return told


def _printed(thing: object) -> str:
    return ADDRESS.sub("", repr(thing))
