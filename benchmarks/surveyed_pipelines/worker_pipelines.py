"""DataLoaders that do something in their workers: seeds, databases."""

import io
import random as python_random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchvision.transforms import v2

from surveyed_pipelines.made_up_data import pixels, write_classes
from surveyed_pipelines.picture_pipelines import folder_of, imagenet_v1
from surveyed_pipelines.pipeline_case import BATCH, COUNT, SIDE, Form, Pipeline, adopted, library


def seed_worker(_number: int) -> None:
    """What PyTorch's notes on reproducibility advise."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    python_random.seed(seed)


def seeded(folder: Path, random: bool) -> DataLoader[Any]:
    return DataLoader(
        folder_of(folder, imagenet_v1(random)), BATCH, shuffle=True, num_workers=2,
        worker_init_fn=seed_worker, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def not_seeded(folder: Path, random: bool, reuse: int) -> Any:
    dataset = folder_of(folder, imagenet_v1(random))
    generator = torch.Generator().manual_seed(0)
    return adopted(
        DataLoader(dataset, BATCH, shuffle=True, num_workers=2, generator=generator), reuse
    )


class Database(Dataset[Any]):
    """Pictures in an lmdb, which each worker opens for itself."""

    def __init__(self, path: Path, lazily: bool = False) -> None:
        self.path = path
        self.lazily = lazily
        self.database: Any = None

    def open(self) -> None:
        self.database = library("lmdb").open(str(self.path), readonly=True, lock=False)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if self.lazily and self.database is None:
            self.open()
        database: Any = self.database
        with database.begin() as reading:
            data = reading.get(b"%03d" % index)
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return v2.functional.pil_to_tensor(picture), index


def write_database(folder: Path) -> None:
    with (
        library("lmdb").open(str(folder / "lmdb"), map_size=1 << 22) as database,
        database.begin(write=True) as writing,
    ):
        for number in range(COUNT):
            data = io.BytesIO()
            Image.fromarray(pixels(number, SIDE, SIDE)).save(data, "PNG")
            writing.put(b"%03d" % number, data.getvalue())


def open_in_worker(_number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.open()  # pyright: ignore[reportAttributeAccessIssue]


def database(folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(
        Database(folder / "lmdb"), BATCH, shuffle=True, num_workers=2, worker_init_fn=open_in_worker
    )


def opened_at_first(folder: Path, _random: bool, reuse: int) -> Any:
    dataset = Database(folder / "lmdb", lazily=True)
    return adopted(DataLoader(dataset, BATCH, shuffle=True, num_workers=2), reuse)


CASES = (
    Pipeline(
        "ImageFolder, workers seeded", "PyTorch's notes on reproducibility", write_classes, seeded,
        (Form("no `worker_init_fn`", not_seeded),),
    ),
    Pipeline(
        "lmdb, opened in worker_init_fn", "PyTorch forums", write_database, database,
        (Form("opened at the first `[i]`", opened_at_first),), packages=("lmdb",), random=False,
    ),
)  # fmt: skip
