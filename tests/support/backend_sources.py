"""Folders of small pictures, and the backends that open them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders import ReuseLoader
from loaders.backends import open_source
from loaders.errors import BackendMissing
from loaders.sources.datasets import picture_folder

SIDE = 32
SAMPLES = {"ant": 9, "bee": 8, "cat": 5}
COUNT = sum(SAMPLES.values())
ROUNDING = 2.0
"""Levels, on average: FFCV decodes with a faster and coarser cosine transform than the others."""


def need(backend: str) -> None:
    """Skip the test where the package is missing, and say how to get it."""
    try:
        if backend == "dali":
            from loaders.backends.dali import import_dali

            import_dali()
        if backend == "ffcv":
            from loaders.backends.ffcv import import_ffcv

            import_ffcv()
    except BackendMissing as error:
        pytest.skip(str(error))


def portrait(number: int, height: int = SIDE, width: int = SIDE) -> NDArray[np.uint8]:
    """Smooth, as photos are, and unlike every other number's."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    tint = np.random.default_rng(number).uniform(30, 220, 3)
    return np.clip(tint + 40 * np.stack([y, x, x - y], axis=-1), 0, 255).astype(np.uint8)


def save(path: Path, number: int, height: int = SIDE, width: int = SIDE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(portrait(number, height, width)).save(path, quality=92)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, number = tmp_path_factory.mktemp("pictures"), 0
    for name, count in SAMPLES.items():
        for _ in range(count):
            save(root / name / f"{number:03}.jpg", number)
            number += 1
    return root


Open = Callable[[str, Path], Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """`opened(backend, folder)` opens the pictures of `folder`; closed after the test."""
    sources: list[Any] = []

    def open_(backend: Any, folder: Path) -> Any:
        need(backend)
        if backend == "ffcv":
            sources.append(open_source(beton_of(folder, tmp_path / "pictures.beton"), "ffcv"))
        else:
            sources.append(open_source(picture_folder(folder, SIDE), backend))
        return sources[-1]

    yield open_
    for source in sources:
        getattr(source, "close", lambda: None)()


def beton_of(folder: Path, out: Path, mode: Any = "jpg") -> Path:
    from loaders.backends.beton import Encoding, convert

    files = picture_folder(folder, SIDE)
    convert(files, out, Encoding(mode, quality=100), workers=2)
    return out


def loader(source: Any, **changes: Any) -> ReuseLoader:
    usual = {"batch_size": 4, "reuse": 3, "buffer_batches": 2, "workers": 2, "seed": 3}
    return ReuseLoader(source, **{**usual, **changes})


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().mean().item()
