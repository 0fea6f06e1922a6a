"""A stream as the loader's reader sees it: samples by their ids, while somebody reads them.

    ids of pass p, from p * 2 ** 40 on   rank, rank + world, rank + 2 world, ...
    positions                            0     1             2

Before the reader is asked for some positions, their raw samples are taken out of the stream and lie
here by their ids; afterwards they are gone. So decoding runs on all workers, and reading on one.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from loaders.errors import SourceError
from loaders.pixels.decoding import ANYWHERE, Room
from loaders.streams.iterable_samples import IterableSamples
from loaders.streams.shard_files import is_remote
from loaders.streams.stream_pass import RawSample, StreamPass, StreamTurn
from loaders.streams.tar_shards import TarShards
from loaders.workers.decode_work import Done, PassOrder, Read

FIRST = 6
"""So many samples are read once more, to see whether they are the same."""
StreamSource = IterableSamples | TarShards
HOW_MANY = "give TarShards(..., samples=n) or IterableSamples(..., samples=n)"


class StreamedSamples:
    """What a pipeline has as its data set."""

    def __init__(self, source: StreamSource) -> None:
        self.source = source
        self.samples = source.samples
        """All ranks together serve so many in a pass. None: as many as there are."""
        self.ends_there = self.samples is not None and source.given is None
        """Whether the number is the data set's own, so that none may come after them."""
        if self.samples == 0:
            raise SourceError("the stream says that it is empty: there is nothing to serve")
        self.look: Callable[[int], RawSample | None] = lambda _: None
        """Looks at the raw sample of an id in the pass that was begun last. None: it has none."""
        self._raw: dict[int, RawSample] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError(f"nobody knows how many samples the stream has: {HOW_MANY}")
        return self.samples

    def __getitem__(self, sample_id: int) -> Any:
        return self.read_into(sample_id, ANYWHERE)

    def read_into(self, sample_id: int, room: Room) -> Any:
        """A sample that was taken out of the stream, or one of the first, which the loader looks
        at to see how large a slot is. None: there is none."""
        raw = self._raw.get(sample_id) or self.look(sample_id)
        if raw is None:
            return None
        try:
            return self.source.decode(raw, room)
        except Exception as error:
            error.add_note(f"while decoding {raw.name}")
            raise

    def reading(self, of: StreamPass, order: PassOrder, read: Read) -> Read:
        """`read`, after the raw samples were taken out of the stream, as far as there are such."""

        def read_some(positions: Sequence[int], slots: Sequence[int], done: Done) -> None:
            there: list[tuple[int, int, int]] = []
            error = None
            ids = order.ids(np.array(positions, dtype=np.int64)).tolist()
            for position, slot, sample_id in zip(positions, slots, ids, strict=True):
                try:
                    raw = of.take(position)
                except BaseException as raised:
                    error = raised  # those before it are served nevertheless
                    break
                if raw is None:
                    break
                with self._lock:
                    self._raw[sample_id] = raw
                there.append((position, slot, sample_id))
            try:
                if there:
                    read([each[0] for each in there], [each[1] for each in there], done)
            finally:
                with self._lock:
                    for _, _, sample_id in there:
                        self._raw.pop(sample_id, None)
            if error is not None:
                raise error

        return read_some

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets the source, and nothing that is being read."""
        return {"source": self.source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


class FirstSamples:
    """A data set of one sample: the first ones of a stream, read anew at every look. What a stream
    draws, it draws once for all serves of a sample, and a resumed pass would read others."""

    def __init__(self, source: StreamSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[Any]:
        with closing(self.source.begin(StreamTurn(0, 0, False, 0, 1))) as reading:
            return [self.source.decode(raw) for raw in islice(reading, FIRST)]


def as_stream(dataset: Any) -> StreamSource | None:
    """The source of a stream: of an IterableDataset, TarShards, ..., of several tars by a pattern
    or in a list, or of a tar behind a URL. None: `dataset` is none."""
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


def _is_tar(path: Any) -> bool:
    return isinstance(path, str | Path) and (is_remote(str(path)) or str(path).endswith(".tar"))
