"""What of a user's data set is a stream.

"shards-{000..099}.tar", "shards-*.tar"     several tars, by a pattern
["a.tar", "b.tar"]                          several tars, or one in a list
"https://host/shard.tar"                    what can only be read from front to back
an IterableDataset, a TarShards, ...
"""

from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from loaders.streams.iterable_samples import IterableSamples
from loaders.streams.shard_files import is_remote
from loaders.streams.stream_source import StreamSource
from loaders.streams.tar_shards import TarShards


def as_stream(dataset: Any) -> StreamSource | None:
    """The source of a stream. None: `dataset` is none."""
    if isinstance(dataset, TarShards | IterableSamples):
        return dataset
    listed = hasattr(dataset, "__len__") or hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not listed):
        return IterableSamples(dataset)
    if isinstance(dataset, str) and _is_pattern(dataset):
        return TarShards(dataset)
    if isinstance(dataset, list | tuple) and dataset and all(map(_is_tar, dataset)):
        return TarShards(dataset)
    return None


def _is_pattern(text: str) -> bool:
    if is_remote(text):
        return True
    several = any(sign in text for sign in "{*?[")
    return several and text.endswith(".tar") and not Path(text).exists()


def _is_tar(one: Any) -> bool:
    return isinstance(one, str | Path) and (is_remote(str(one)) or str(one).endswith(".tar"))
