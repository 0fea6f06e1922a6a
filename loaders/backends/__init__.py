"""Sources of decoded samples, which are chosen by name; the loader around them stays the same.

    native   our own decoding, in the loader's threads         any map-style data set, folder, .tar
    dali     NVIDIA DALI decodes, on the GPU if there is one   folder of pictures, .tar
    ffcv     FFCV's file format and decoder                    .beton (`python -m loaders.convert`)

A backend is a map-style source: `len()`, `[i] -> (picture, label)` where a picture is uint8 [3, H,
W], and `__getitems__(ids)` where several at once are cheaper. Several threads call it. A backend's
package is imported only when the backend is asked for.

May import: errors, order, pixels, sources, workers.
"""

from pathlib import Path
from typing import Any, Literal, get_args

from loaders.errors import SourceError
from loaders.pixels.decoding import unreadable
from loaders.sources.archives import PictureTar, picture_tar
from loaders.sources.datasets import PictureFiles, picture_folder

Backend = Literal["native", "dali", "ffcv"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def open_source(dataset: Any, backend: Backend = "native", size: int | None = None) -> Any:
    """The map-style source that `backend` makes of `dataset`, a path or a map-style data set. If
    `size` is given, pictures of a path become squares with that side."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if isinstance(dataset, str):
        dataset = Path(dataset)
    if backend == "ffcv":
        return _open_beton(dataset, size)
    if isinstance(dataset, Path):
        dataset = _open_path(dataset, size)
    elif size is not None:
        raise ValueError(
            f"size={size} has no effect on a data set that is open already: leave it out"
        )
    return dataset if backend == "native" else _open_dali(dataset)


def _open_path(path: Path, size: int | None) -> Any:
    if path.suffix == ".beton":
        raise SourceError(f'{path} is a file of FFCV: open it with backend="ffcv"')
    if path.suffix == ".tar":
        return picture_tar(path, size)
    return picture_folder(path, size)


def _open_dali(dataset: Any) -> Any:
    from loaders.backends.dali import DaliPictures, this_device

    if not isinstance(dataset, Encoded):
        raise SourceError(
            "the dali backend decodes pictures in files: give it a folder CLASS/NAME.jpg or a .tar"
            f" (or what picture_folder makes of it), not {type(dataset).__name__}"
        )
    return DaliPictures(dataset, this_device())


def _open_beton(dataset: Any, size: int | None) -> Any:
    if not isinstance(dataset, Path) or dataset.suffix != ".beton":
        given = dataset if isinstance(dataset, Path) else type(dataset).__name__
        raise SourceError(
            f'the ffcv backend reads .beton files, not {given}: "python -m loaders.convert SOURCE'
            ' OUT.beton" writes one'
        )
    if size is not None:
        raise ValueError(
            f"size={size} has no effect on {dataset}, whose pictures have the size they were"
            " written with: leave it out"
        )
    from loaders.backends.ffcv import BetonPictures

    return BetonPictures(dataset)


Encoded = PictureFiles | PictureTar


def read(source: Encoded, index: int) -> bytes:
    """The encoded picture of a sample."""
    try:
        return source.read(index)
    except OSError as error:
        raise unreadable(source.name_of(index), error) from error
