"""The samples of a .beton file, which is FFCV's format. Several threads may ask for any of them.

    header | fields | metadata: (mode, width, height, ptr), label | pages of pixels | table of sizes
                       '---- FFCV's Reader keeps it ----'           '---- pread by ptr

FFCV's own call of libjpeg-turbo decodes a "jpg" picture; a "raw" one is read straight into the
sample. The file is not mapped, because a failing disk would then kill the process.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.errors import BackendMissing, DecodeError, SourceError
from loaders.pixels.decoding import PictureDecoder, check_extent

IMAGE, LABEL = "image", "label"
JPG, RAW = 0, 1
"""The ways to store a picture (`IMAGE_MODES` of FFCV)."""

# FFCV ships no types that a checker could use.
Ffcv = Any


@dataclass(frozen=True, slots=True)
class BetonIndex:
    """Where the pictures of a .beton file lie, and their labels: one row for each sample."""

    modes: NDArray[np.uint8]
    heights: NDArray[np.uint16]
    widths: NDArray[np.uint16]
    starts: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    labels: NDArray[np.int64]


class BetonPictures:
    """A map-style data set of the file `path`. Its pictures have the size that they were stored
    with."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._ffcv = import_ffcv()
        self._index = read_index(self.path, self._ffcv)
        self._file: int | None = os.open(self.path, os.O_RDONLY)

    @property
    def labels(self) -> list[int]:
        return self._index.labels.tolist()

    @property
    def samples(self) -> list[tuple[Path, int]]:
        """(file, label) of each sample, as torchvision's folders have them, for a cache."""
        return [(self.path, label) for label in self.labels]

    def __len__(self) -> int:
        return len(self._index.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        at = self._index
        shape = (int(at.heights[index]), int(at.widths[index]), 3)
        try:
            check_extent(*shape[:2])
        except Image.DecompressionBombError as error:
            raise self._unreadable(index, str(error)) from error
        read = self._jpg if at.modes[index] == JPG else self._raw
        pixels = read(index, shape)
        return torch.from_numpy(pixels).permute(2, 0, 1), int(at.labels[index])

    def close(self) -> None:
        """Close the file. It is safe to call this again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _jpg(self, index: int, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        data, pixels = self._bytes(index, int(self._index.sizes[index])), np.empty(shape, np.uint8)
        height, width = shape[:2]
        # These arguments ask for the whole picture: unscaled, not cropped, not flipped.
        failed = self._ffcv.libffcv.imdecode(
            data, pixels, height, width, height, width, 0, 0, 1, 1, False, False
        )
        if failed:
            raise self._unreadable(index, _reason(data))
        return pixels

    def _raw(self, index: int, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        return self._bytes(index, int(np.prod(shape, dtype=np.int64))).reshape(shape)

    def _bytes(self, index: int, size: int) -> NDArray[np.uint8]:
        if self._file is None:
            raise SourceError(f"{self.path} was closed: open it again to read from it")
        data, start, done = np.empty(size, np.uint8), int(self._index.starts[index]), 0
        while done < size:
            try:
                count = os.preadv(self._file, [data[done:].data], start + done)
            except OSError as error:
                raise self._unreadable(index, str(error)) from error
            if not count:
                raise self._unreadable(index, f"the file ends {size - done} bytes too early")
            done += count
        return data

    def _unreadable(self, index: int, reason: str) -> DecodeError:
        return DecodeError(
            f"cannot decode sample {index} of {self.path}: {reason}; write the file again"
            " (python -m loaders.convert)"
        )


def read_index(path: Path, ffcv: Ffcv) -> BetonIndex:
    """The index of a file. Raises SourceError unless the file is whole and has the two fields."""
    if not path.is_file():
        raise SourceError(f"there is no file {path}: python -m loaders.convert writes one")
    types, in_file = ffcv.types, path.stat().st_size
    header = np.fromfile(path, dtype=types.HeaderType, count=1)
    if len(header) == 0 or header[0]["version"] != types.CURRENT_VERSION:
        raise SourceError(
            f"{path} is no .beton file of version {types.CURRENT_VERSION}: python -m"
            " loaders.convert writes one"
        )
    promised = int(header[0]["num_fields"]) * types.FieldDescType.itemsize
    promised += int(header[0]["num_samples"])  # at least one byte for each sample
    if not promised < int(header[0]["alloc_table_ptr"]) < in_file:
        raise _cut_off(path, in_file)
    try:
        reader = ffcv.reader.Reader(str(path))
    except (AssertionError, ValueError, LookupError, OSError) as error:
        raise SourceError(
            f"FFCV cannot read {path}: {error or type(error).__name__}; write it again (python -m"
            " loaders.convert)"
        ) from error
    image = _column(reader, path, IMAGE, "RGBImageField")
    label = _column(reader, path, LABEL, "IntField")
    starts, sizes = image["data_ptr"], _sizes(reader, image["data_ptr"])
    if sizes is None or len(starts) != reader.num_samples or (starts + sizes > in_file).any():
        raise _cut_off(path, in_file)
    pixels = image["height"].astype(np.uint64) * image["width"] * 3
    wrong = np.flatnonzero((image["mode"] > RAW) | ((image["mode"] == RAW) & (sizes != pixels)))
    if len(wrong):
        raise SourceError(
            f"{path} contradicts itself about the size or mode of sample {wrong[0]}: write it again"
            " (python -m loaders.convert)"
        )
    return BetonIndex(image["mode"], image["height"], image["width"], starts, sizes, label)


def _column(reader: Any, path: Path, name: str, kind: str) -> NDArray[Any]:
    """The metadata of field `name`: a record or a number for each sample."""
    fields = {n: type(handler).__name__ for n, handler in reader.handlers.items()}
    if fields.get(name) != kind:
        has = ", ".join(f"{n}: {k}" for n, k in fields.items())
        raise SourceError(
            f"{path} has no field '{name}' of type {kind}; it has {has}: python -m loaders.convert"
            " writes one that does"
        )
    return reader.metadata[reader.metadata.dtype.names[reader.field_names.index(name)]]


def _sizes(reader: Any, starts: NDArray[np.uint64]) -> NDArray[np.uint64] | None:
    """The number of bytes at each of `starts`, by the file's table. None: it lacks some."""
    order = np.argsort(reader.alloc_table["ptr"])
    known = reader.alloc_table["ptr"][order]
    places = np.searchsorted(known, starts)
    if len(known) == 0 or places.max(initial=0) >= len(known) or (known[places] != starts).any():
        return None
    return reader.alloc_table["size"][order][places]


def _cut_off(path: Path, in_file: int) -> SourceError:
    return SourceError(
        f"{path} is cut off or was not finished ({in_file} bytes): write it again (python -m"
        " loaders.convert)"
    )


def import_ffcv() -> Ffcv:
    try:
        import ffcv  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendMissing(
            f"the ffcv backend needs FFCV ({error}): run scripts/install_ffcv_packages.sh, then pip"
            " install '.[ffcv]'"
        ) from error
    return ffcv


def _reason(data: NDArray[np.uint8]) -> str:
    """Why a JPEG cannot be decoded: FFCV's decoder does not say, so another one is asked."""
    try:
        PictureDecoder(None).pixels(data.tobytes())
    except Exception as known:  # decoders raise all kinds of errors
        return str(known)
    return "FFCV cannot decode its JPEG"
