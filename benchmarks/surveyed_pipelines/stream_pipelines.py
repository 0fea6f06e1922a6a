"""Samples that are iterated: an IterableDataset, WebDataset's tars."""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from surveyed_pipelines.made_up_data import nothing, picture, pixels
from surveyed_pipelines.picture_pipelines import imagenet_v1
from surveyed_pipelines.pipeline_case import BATCH, COUNT, Form, Pipeline, library

# ---- a bare IterableDataset ----------------------------------------------------------------------


class Numbered(IterableDataset[Any]):
    """Each worker iterates its share, as torch's docs advise."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.count, step):
            yield torch.from_numpy(pixels(number)).permute(2, 0, 1), number


def numbered(_folder: Path, _random: bool) -> DataLoader[Any]:
    return DataLoader(Numbered(), BATCH, num_workers=2)


# ---- WebDataset ----------------------------------------------------------------------------------


def write_tars(folder: Path) -> None:
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as tar:
            for number in range(shard, COUNT, 2):
                data = io.BytesIO()
                picture(number).save(data, "JPEG")
                for suffix, content in ("jpg", data.getvalue()), ("cls", str(number).encode()):
                    info = tarfile.TarInfo(f"{number:03d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def same(value: Any) -> Any:
    return value


def tars(folder: Path) -> str:
    return f"{folder}/shard-{{000..001}}.tar"


def web_samples(folder: Path, transform: Callable[[Any], Any]) -> Any:
    opened = library("webdataset").WebDataset(tars(folder), shardshuffle=False, empty_check=False)
    return opened.shuffle(10).decode("pil").to_tuple("jpg", "cls").map_tuple(transform, same)


def web_single(folder: Path, random: bool) -> DataLoader[Any]:
    """Batches made by the DataLoader."""
    return DataLoader(web_samples(folder, imagenet_v1(random)), BATCH, num_workers=2)


def web_batched(folder: Path, random: bool) -> DataLoader[Any]:
    """Batches made in the pipeline, as WebDataset's docs advise."""
    batched = web_samples(folder, imagenet_v1(random)).batched(BATCH)
    return DataLoader(batched, batch_size=None, num_workers=2)


def web_one_by_one(folder: Path) -> list[Any]:
    return list(web_samples(folder, imagenet_v1(False)))


def pil_and_class(files: dict[str, Any]) -> Any:
    return Image.open(io.BytesIO(files["jpg"])).convert("RGB"), int(files["cls"])


def of_tars(folder: Path, random: bool, reuse: int) -> Any:

    from loaders import ReuseLoader

    shards = library("loaders.streams").TarShards(tars(folder), pil_and_class)
    return ReuseLoader(shards, BATCH, reuse, augment=imagenet_v1(random), workers=2)


CASES = (
    Pipeline("IterableDataset, a share a worker", "torch.utils.data docs", nothing, numbered,
             random=False),
    Pipeline(
        "WebDataset, samples", "webdataset's docs", write_tars, web_single,
        (Form("`TarShards(tars, decode)`, `augment=transform`", of_tars),),
        packages=("webdataset",),
    ),
    Pipeline(
        "WebDataset, batched in the pipeline", "webdataset's docs", write_tars, web_batched,
        (Form("`TarShards(tars, decode)`, `augment=transform`", of_tars),),
        packages=("webdataset",), samples=web_one_by_one, collate=default_collate,
    ),
)  # fmt: skip
