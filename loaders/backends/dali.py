"""Pictures in a folder or a tar, which NVIDIA DALI decodes: on the GPU if there is one, or the CPU.

A DALI pipeline runs for one thread at a time, so every decode thread of the loader takes one from
`_idle`, or makes one, which takes milliseconds, and puts it back when it succeeded. Taking from a
deque and adding to it are atomic, so no lock is needed. If one fails, its pictures are decoded one
by one, to find the one that failed. Pixels are those of the native backend on a CPU, except for the
rounding of a resize and of 16-bit PNGs.
"""

import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.backends import Encoded, read
from loaders.errors import BackendMissing
from loaders.pixels.decoding import PictureDecoder, check_encoded, unreadable
from loaders.sources.archives import PictureTar

log = logging.getLogger(__name__)

ENCODED = "encoded"
MOST_AT_ONCE = 32
"""This many pictures are decoded in one run of a pipeline, which keeps room for as many."""

# DALI ships no types that a checker could use.
Dali = Any
Pipeline = Any


class DaliPictures:
    """The samples of `files`, decoded by DALI. Several threads may ask for any samples."""

    def __init__(self, files: Encoded, device_id: int | None = None) -> None:
        """`device_id` is the GPU that decodes. None: the CPU decodes."""
        self.files = files
        self.device_id = device_id
        self._dali = import_dali()
        self._idle: deque[Pipeline] = deque()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.files.classes

    @property
    def labels(self) -> Sequence[int]:
        return self.files.labels

    @property
    def samples(self) -> list[tuple[Path | str, int]]:
        """(file, label) of each sample, as torchvision's folders have them, for a cache."""
        files = self.files
        paths = [files.path] * len(files) if isinstance(files, PictureTar) else files.paths
        return list(zip(paths, files.labels, strict=True))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Read several samples at once, as torch's loaders ask for them, on worker threads."""
        samples: list[tuple[torch.Tensor, int]] = []
        for first in range(0, len(ids), MOST_AT_ONCE):
            chunk = ids[first : first + MOST_AT_ONCE]
            encoded = [self._read_encoded(i) for i in chunk]
            pictures = self._decode_or_blame(chunk, encoded)
            samples += zip(pictures, (self.files.labels[i] for i in chunk), strict=True)
        return samples

    def close(self) -> None:
        """Free the pipelines. It is safe to call this again, and to ask for a sample later."""
        self._idle.clear()

    def __getstate__(self) -> dict[str, Any]:
        # Pipelines cannot leave their process.
        return {"files": self.files, "device_id": self.device_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _read_encoded(self, index: int) -> NDArray[np.uint8]:
        data = read(self.files, index)
        try:
            check_encoded(data, self.files.decoder.pixel_limit)
        except Image.DecompressionBombError as error:
            raise unreadable(self.files.name_of(index), error) from error
        except Exception:  # DALI may be able to decode it; if not, it raises
            log.debug("%s of the files: DALI alone knows how large it is", index)
        return np.frombuffer(data, dtype=np.uint8)

    def _decode_or_blame(
        self, ids: Sequence[int], encoded: Sequence[NDArray[np.uint8]]
    ) -> list[torch.Tensor]:
        try:
            return self._decode(encoded)
        except RuntimeError as error:
            for index, data in zip(ids, encoded, strict=True):
                try:
                    self._decode([data])
                except RuntimeError as its_own:
                    why = _reason(data, its_own)
                    raise unreadable(self.files.name_of(index), why) from its_own
            error.add_note(
                f"DALI failed on the samples {list(ids)} together, and on none of them alone"
            )
            raise

    def _decode(self, encoded: Sequence[NDArray[np.uint8]]) -> list[torch.Tensor]:
        try:
            pipeline = self._idle.pop()
        except IndexError:
            pipeline = self._make_pipeline()
        pipeline.feed_input(ENCODED, list(encoded))
        (pictures,) = pipeline.run()
        if self.device_id is not None:
            pictures = pictures.as_cpu()
        # DALI overwrites its memory at the next run.
        copies = [np.array(pictures.at(n)) for n in range(len(encoded))]
        self._idle.append(pipeline)
        return [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in copies]

    def _make_pipeline(self) -> Pipeline:
        dali = self._dali
        pipeline = dali.Pipeline(
            batch_size=MOST_AT_ONCE,
            num_threads=1,
            device_id=self.device_id,
            prefetch_queue_depth=1,  # a run returns what was fed to it; nothing is read ahead
        )
        with pipeline:
            encoded = dali.fn.external_source(name=ENCODED, batch=True, no_copy=True)
            pixels = dali.fn.decoders.image(
                encoded,
                device="cpu" if self.device_id is None else "mixed",
                output_type=dali.types.RGB,
                adjust_orientation=self.files.decoder.exif,
            )
            size = self.files.decoder.size
            pipeline.set_outputs(pixels if size is None else self._square(encoded, pixels, size))
        pipeline.build()
        return pipeline

    def _square(self, encoded: Any, pixels: Any, size: int) -> Any:
        """Resize the middle square, as `PictureDecoder` does."""
        dali = self._dali
        shape = dali.fn.peek_image_shape(encoded, adjust_orientation=self.files.decoder.exif)
        shape = dali.fn.cast(shape, dtype=dali.types.FLOAT)
        height, width = shape[0], shape[1]
        side = dali.math.min(height, width)
        return dali.fn.resize(
            pixels,
            size=[size, size],
            roi_start=dali.fn.stack((height - side) / 2, (width - side) / 2),
            roi_end=dali.fn.stack((height + side) / 2, (width + side) / 2),
            interp_type=dali.types.INTERP_LINEAR,
            antialias=True,
        )


def this_device() -> int | None:
    """The GPU of this process, which is that of its local rank. None: there is no GPU."""
    if not torch.cuda.is_available():
        return None
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def import_dali() -> Dali:
    try:
        import nvidia.dali as dali  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendMissing(
            f"the dali backend needs NVIDIA DALI ({error}): pip install '.[dali]'"
        ) from error
    return dali


def _reason(data: NDArray[np.uint8], error: RuntimeError) -> str:
    """The reason why a picture is unreadable. DALI gives a number for most errors, so the native
    decoder is asked for the reason first."""
    try:
        PictureDecoder(None).pixels(data.tobytes())
    except (OSError, ValueError, Image.DecompressionBombError) as known:
        return str(known)
    lines = str(error).rsplit("encountered:", 1)[-1].strip().splitlines()
    return f"DALI says: {lines[0] if lines else type(error).__name__}"
