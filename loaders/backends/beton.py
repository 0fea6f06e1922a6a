"""Writing the samples of any data set as a .beton file, in order.

    source -> encode, several at a time -> one writer -> header | fields | metadata | pages | table

A JPEG that needs no resize keeps its bytes, after it was decoded once as a trial. The file does not
depend on the number of workers, and is renamed to `out` when it is whole. FFCV's own writer is not
used, because it waits for ever for a worker that failed on a bad picture.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.backends import Encoded, read
from loaders.backends.ffcv import IMAGE, JPG, LABEL, import_ffcv
from loaders.errors import LoaderError, SourceError
from loaders.order.serve import Serve
from loaders.pixels.decoding import UPRIGHT, as_rgb, jpeg_orientation, unreadable
from loaders.pixels.jpegs import is_jpeg
from loaders.workers.decode_work import DecodeWork, Done, PassJobs
from loaders.workers.prefetcher import Prefetcher

PAGE_BYTES = 1 << 23
"""FFCV reads whole pages, and no picture may lie in two of them."""
LARGEST_PAGE = 1 << 31
QUALITY = 95
LONGEST_SIDE = (1 << 16) - 1

Mode = Literal["jpg", "raw"]
Metadata = NDArray[Any]  # one row of FFCV's structured metadata
Samples = Any  # a map-style data set: len() and [i] -> (picture, label)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How pictures are stored. If `quality` is None, JPEGs stay as they are."""

    mode: Mode
    max_side: int | None = None
    quality: int | None = None

    @property
    def page_bytes(self) -> int:
        largest = 3 * (self.max_side or 0) ** 2
        return min(max(PAGE_BYTES, 1 << (largest - 1).bit_length()), LARGEST_PAGE)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written to a file."""

    pictures: int
    kept: int
    """The number of JPEGs that have the bytes of the source."""
    file_bytes: int


def convert(
    source: Samples,
    out: Path,
    encoding: Encoding,
    workers: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> Written:
    """Write every sample of `source` to `out`, in order. `advance` is called after each."""
    if len(source) == 0:
        raise SourceError("the source is empty: there is nothing to write")
    encoder = Encoder(source, encoding)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            kept = _write(file, encoder, len(source), workers, advance)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return Written(len(source), kept, size)


class Encoder:
    """Encodes samples. Several threads may call it."""

    def __init__(self, source: Samples, encoding: Encoding) -> None:
        ffcv = import_ffcv()
        self.encoding = encoding
        self.types = ffcv.types
        self._source = source
        self._image = ffcv.fields.RGBImageField(
            write_mode=encoding.mode,
            max_resolution=encoding.max_side,
            jpeg_quality=encoding.quality or QUALITY,
        )
        self.fields = {IMAGE: self._image, LABEL: ffcv.fields.IntField()}
        self.row_type = ffcv.types.get_metadata_type(list(self.fields.values()))

    def __call__(self, index: int) -> tuple[Metadata, NDArray[np.uint8], bool]:
        """The metadata and the bytes of a sample, and whether the bytes are those of the source."""
        row: Metadata = np.zeros(1, dtype=self.row_type)
        image, label = (row[name] for name in self.row_type.names)
        files = self._source
        if isinstance(files, Encoded) and files.decoder.size is None:
            label[0], data = files.labels[index], read(files, index)
            try:
                pixels = files.decoder.pixels(data)
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise unreadable(files.name_of(index), error) from error
            if self._keeps(data, pixels, files.decoder.exif):
                image["mode"], (image["height"], image["width"]) = JPG, pixels.shape[:2]
                return row, np.frombuffer(data, dtype=np.uint8), True
        else:
            pixels, label[0] = _sample(self._source, index)
        if max(pixels.shape) > LONGEST_SIDE and not self.encoding.max_side:
            raise SourceError(
                f"sample {index} is {pixels.shape[1]}x{pixels.shape[0]} pixels, but FFCV stores at"
                f" most {LONGEST_SIDE} a side: give --max-side"
            )
        blobs: list[NDArray[np.uint8]] = []

        def room(size: int) -> tuple[int, NDArray[np.uint8]]:
            blobs.append(np.empty(size, dtype=np.uint8))
            return 0, blobs[0]

        self._image.encode(image, pixels, room)
        return row, blobs[0], False

    def _keeps(self, data: bytes, pixels: NDArray[np.uint8], exif: bool) -> bool:
        how = self.encoding
        if how.mode != "jpg" or how.quality is not None or not is_jpeg(data):
            return False
        longest = max(pixels.shape[:2])
        # A printers' JPEG has four channels, and FFCV's decoder needs three.
        with Image.open(BytesIO(data)) as picture:
            printed = picture.mode == "CMYK"
        if exif and jpeg_orientation(data) != UPRIGHT:  # FFCV's decoder does not turn it
            return False
        return not printed and longest <= min(how.max_side or LONGEST_SIDE, LONGEST_SIDE)


def _sample(source: Samples, index: int) -> tuple[NDArray[np.uint8], int]:
    """The RGB pixels [H, W, 3] and the label of a sample of any data set."""
    try:
        picture, label = source[index]
        label = int(label)
    except LoaderError:
        raise
    except Exception as error:  # a data set may raise any error
        raise SourceError(
            f"sample {index} cannot be read as (picture, label): {type(error).__name__}: {error};"
            " let the data set return a picture and the number of its class"
        ) from error
    if isinstance(picture, Image.Image):
        picture = np.array(as_rgb(picture))
    if isinstance(picture, torch.Tensor) and picture.ndim == 3:
        picture = picture.permute(1, 2, 0).numpy()
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3:
        kind = type(picture).__name__
        if hasattr(picture, "dtype"):
            kind = f"{picture.dtype} of shape {tuple(picture.shape)}"
        raise SourceError(
            f"the picture of sample {index} is {kind}: give a PIL picture, a uint8 tensor [3, H, W]"
            " or a uint8 array [H, W, 3], without augmentation or normalisation"
        )
    if picture.shape[2] != 3:
        raise SourceError(
            f"sample {index} has {picture.shape[2]} channels, FFCV stores 3: convert it to RGB"
        )
    return np.ascontiguousarray(picture), label


def _write(
    file: BinaryIO, encoder: Encoder, samples: int, workers: int, advance: Callable[[], None]
) -> int:
    types, page = encoder.types, encoder.encoding.page_bytes
    header: NDArray[Any] = np.zeros(1, dtype=types.HeaderType)
    header["version"], header["page_size"] = types.CURRENT_VERSION, page
    header["num_samples"], header["num_fields"] = samples, len(encoder.fields)
    fields: NDArray[Any] = np.zeros(len(encoder.fields), dtype=types.FieldDescType)
    type_ids = {handler: number for number, handler in types.TYPE_ID_HANDLER.items()}
    for row, (name, field) in zip(fields, encoder.fields.items(), strict=True):
        row["type_id"] = type_ids[type(field)]
        row["name"][: len(name)] = list(name.encode("ascii"))
    metadata: NDArray[Any] = np.zeros(samples, dtype=encoder.row_type)
    places: NDArray[Any] = np.zeros(samples, dtype=types.ALLOC_TABLE_TYPE)

    def next_page(at: int) -> int:
        return -(-at // page) * page

    at, kept = next_page(header.nbytes + fields.nbytes + metadata.nbytes), 0
    for index, (row, data, as_it_was) in enumerate(_encode_all(encoder, samples, workers)):
        if data.nbytes > page:
            raise SourceError(
                f"sample {index} takes {data.nbytes / 2**20:.1f} MiB, a page of the file has"
                f" {page / 2**20:.0f}: give --max-side (1600, say) or --mode jpg"
            )
        if at // page != (at + data.nbytes - 1) // page:
            at = next_page(at)
        metadata[index] = row[0]
        metadata[index][encoder.row_type.names[0]]["data_ptr"] = at
        places[index] = index, at, data.nbytes
        file.seek(at)
        file.write(data.data)
        at, kept = at + data.nbytes, kept + as_it_was
        advance()
    file.write(places.tobytes())
    header["alloc_table_ptr"] = at
    end = file.tell()
    file.seek(0)
    file.write(header.tobytes() + fields.tobytes() + metadata.tobytes())
    file.seek(end)
    return kept


def _encode_all(
    encoder: Encoder, samples: int, workers: int
) -> Iterator[tuple[Metadata, NDArray[np.uint8], bool]]:
    """Every sample in order. `workers` threads encode a few samples ahead."""
    slots = 4 * workers
    done: list[Any] = [None] * slots

    def encode(positions: Sequence[int], slots: Sequence[int], note: Done) -> None:
        for position, slot in zip(positions, slots, strict=True):
            done[slot] = encoder(position)
            note(position)

    def give(_index: int, _serve: Serve, slots: NDArray[np.int64]) -> Any:
        return done[slots[0]]

    pool = Prefetcher(slots=slots, workers=workers)
    try:
        pool.begin(DecodeWork(PassJobs.whole_pass(samples), encode, give, 1))
        for position in range(samples):
            pool.plan(position, Serve(np.array([position]), np.zeros(1, dtype=np.int64)))
            yield pool.take()
    finally:
        pool.close()
