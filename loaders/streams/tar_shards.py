"""WebDataset's shards: tars that are read one after the other, shuffled and dealt to the ranks.

    shards of a pass   7 2 9 4 0 ...    f(seed, pass): the same on all ranks
    rank 0 of 2        7   9   0        every second one; inside a shard the stored order, which the
    rank 1 of 2          2   4          loader's buffer mixes

A place is (shard, byte of the sample's first header), so a pass goes on anywhere at once.
"""

import glob
import hashlib
import itertools
import posixpath
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from loaders.errors import DecodeError, SourceError, StateError, check_at_least_one
from loaders.order.keyed_permutation import KeyedPermutation, SourceOrder
from loaders.pixels.decoding import ANYWHERE, PictureDecoder, Room
from loaders.sources.archives import LABEL_SUFFIX
from loaders.sources.datasets import PICTURE_SUFFIXES
from loaders.streams.shard_files import KEY, ShardAccess, ShardFile, is_remote, tar_samples
from loaders.streams.stream_pass import Place, RawSample, StreamReading, StreamTurn

Paths = str | Path | Sequence[str | Path]
Decode = Callable[[dict[str, Any]], Any]
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


class TarShards:
    """The samples in tars, as a stream for `ReuseLoader`."""

    def __init__(
        self,
        paths: Paths,
        decode: Decode | None = None,
        *,
        size: int | None = None,
        square: bool = True,
        timeout: float = 60.0,
        retries: int = 4,
        options: Mapping[str, Any] | None = None,
        samples: int | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`paths`: tars or URLs; `{000..099}`, `{a,b}` and, on this machine, `*` stand for several.
        `decode` makes a sample of {"__key__": name, "jpg": bytes, "cls": bytes, ...}; several
        threads call it, and it draws nothing. Without it a sample is (picture, number of its
        class), and `size` and `square` say what is stored of a picture. `options` go to fsspec.
        `samples`: all ranks together serve so many in a pass. None: as many as there are."""
        if decode is not None and size is not None:
            raise ValueError(f"size={size} has no effect on samples of decode: leave it out")
        if samples is not None:
            check_at_least_one("samples", samples)
        self.paths = expanded(paths)
        self.samples = self.given = samples  # a tar does not say how much is in it
        self._decode = decode
        self._pictures = PictureDecoder(size, square)
        self._access = ShardAccess(timeout, retries, dict(options or {}), wait)
        self._sizes: dict[str, int] = {}

    @property
    def is_read_twice(self) -> bool:
        # Behind a URL this would cost an answer of the server more at every start.
        return self._decode is not None and not any(map(is_remote, self.paths))

    @property
    def identity(self) -> str:
        names = "\n".join(posixpath.basename(path) for path in self.paths)
        return (
            f"{len(self.paths)} tars {hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
        )

    def check(self, world_size: int) -> None:
        if len(self.paths) < world_size:
            raise SourceError(
                f"{len(self.paths)} tars cannot be dealt to {world_size} ranks, because every rank"
                " reads tars of its own: pack more of them, with fewer samples each"
            )

    def begin(self, turn: StreamTurn, place: Place | None = None, skip: int = 0) -> StreamReading:
        """The samples in the tars that a rank reads in a pass."""
        count = len(self.paths)
        order = KeyedPermutation(count, (turn.seed, turn.pass_index)) if turn.shuffle else None
        mine = SourceOrder(count, order, range(turn.rank, count, turn.world_size))
        shards = [self.paths[number] for number in mine]
        first, begun = 0 if place is None else int(place["shard"]), itertools.count()
        for number in range(first, len(shards)):
            path, offset = shards[number], 0
            if place is not None:
                offset = int(place["offset"])
                if place["size"] is not None:
                    self._sizes.setdefault(path, place["size"])
            file = ShardFile(path, self._access, offset, self._sizes.get(path))
            with closing(file):
                for sample in tar_samples(file, lambda: next(begun) >= skip):
                    if file.size is not None:
                        self._sizes.setdefault(path, file.size)
                    if place is not None and place["key"] != sample.key:
                        raise _other_sample_error(path, place, sample.key)
                    place = None
                    here = {
                        "shard": number,
                        "offset": sample.offset,
                        "key": sample.key,
                        "size": file.size,
                    }
                    mark = f"{sample.key} at byte {sample.offset} of {file.size}"
                    files = {**sample.files, KEY: sample.key}
                    yield RawSample(f"{path}:{sample.key}", files, here, mark)
                if place is not None:
                    raise _other_sample_error(path, place, "nothing")

    def decode(self, raw: RawSample, room: Room = ANYWHERE) -> Any:
        """The sample; of a picture and its class, with the pixels in the memory of `room`."""
        if self._decode is not None:
            return self._decode(raw.data)
        files: dict[str, Any] = raw.data
        pictures = [name for name in files if f".{name}".endswith(PICTURE_SUFFIXES)]
        pictures = [name for name in pictures if "." not in name] or pictures
        word = files.get(LABEL_SUFFIX[1:], b"").decode("utf-8", "replace").strip()
        if len(pictures) != 1 or not word.isdecimal():
            there = ", ".join(sorted(name for name in files if name != KEY))
            raise DecodeError(
                f"{raw.name} is not one picture with the number of its class in a {LABEL_SUFFIX}"
                f" beside it (there are: {there}; the class is {word!r}): give"
                " TarShards(..., decode=), which makes a sample of these files"
            )
        return self._pictures.decode(files[pictures[0]], raw.name, room), int(word)


def _other_sample_error(path: str, place: Place, key: str) -> StateError:
    return StateError(
        f"the saved state goes on with {place['key']} at byte {place['offset']} of {path}, where"
        f" {key} is: give the tars of the run that saved it"
    )


def expanded(paths: Paths) -> list[str]:
    """All paths that patterns stand for, in their order."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    expanded_paths: list[str] = []
    for pattern in map(str, given):
        for path in _braces(pattern):
            if is_remote(path) or not any(sign in path for sign in "*?["):
                expanded_paths.append(path)
            elif there := sorted(glob.glob(path)):
                expanded_paths += there
            else:
                raise SourceError(f"there is no file {path}: give tars, or a pattern of some")
    if not expanded_paths:
        raise SourceError("there are no tars to read: the list is empty")
    path, times = Counter(expanded_paths).most_common(1)[0]
    if times > 1:
        raise SourceError(
            f"{path} is listed {times} times, so its samples would be served as often: list it"
            " once, and raise reuse instead"
        )
    return expanded_paths


def _braces(text: str) -> list[str]:
    match = BRACES.search(text)
    if match is None:
        return [text]
    begin, end, words = match.groups()
    each = words.split(",") if words else _numbers(begin, end)
    before, after = text[: match.start()], text[match.end() :]
    return [before + word + rest for word in each for rest in _braces(after)]


def _numbers(begin: str, end: str) -> list[str]:
    """As a shell has them: also downwards, and all as wide if one of both begins with a zero."""
    padded = any(len(word) > 1 and word.startswith("0") for word in (begin, end))
    width = max(len(begin), len(end)) if padded else 0
    step = 1 if int(begin) <= int(end) else -1
    return [str(number).zfill(width) for number in range(int(begin), int(end) + step, step)]
