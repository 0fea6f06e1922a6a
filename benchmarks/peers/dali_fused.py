# pyright: basic, reportMissingImports=false
"""NVIDIA DALI on the CPU: decoding and cropping fused, uint8."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from benchmarks.peers.contract import Batches, Job, Peer
from benchmarks.peers.folders import listing


@pipeline_def  # adds its own parameters
def pictures(paths: list[str], labels: list[int], size: int, antialias: bool) -> Any:
    data, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, name="files")
    image = fn.decoders.image_random_crop(
        data, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
    )  # fmt: skip
    image = fn.resize(
        image, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR, antialias=antialias
    )
    return fn.flip(image, horizontal=fn.random.coin_flip()), label


class Dali:
    def __init__(self, job: Job, antialias: bool) -> None:
        paths, labels = listing(job.folder)
        pipeline: Any = cast(Any, pictures)(
            [str(p) for p in paths], labels, job.crop, antialias, batch_size=job.batch,
            device_id=None, num_threads=job.workers, seed=job.seed,
        )  # fmt: skip
        self.batches = DALIGenericIterator(
            [pipeline], ["image", "label"], reader_name="files", auto_reset=True,
            last_batch_policy=LastBatchPolicy.PARTIAL,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        for [batch] in self.batches:
            yield batch["image"], batch["label"]


class DaliFused(Peer):
    def __init__(self, antialias: bool = True) -> None:
        self.antialias = antialias
        self.output = f"uint8 HWC, {'antialiased' if antialias else 'linear'}"

    def open(self, job: Job, work: Path) -> Batches:
        return Dali(job, self.antialias)
