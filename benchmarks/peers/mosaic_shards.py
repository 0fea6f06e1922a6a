# pyright: basic, reportMissingImports=false
"""MosaicML Streaming: the JPEGs as they are in its shard files, on the local disk.

It asks for numpy < 2.2 and brings the clients of four clouds: give it a venv of its own, with
`pip install mosaicml-streaming simplejpeg opencv-python-headless`, and say where it is by
`--python mosaic=VENV/bin/python`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from peers import cropping
from peers.contract import Batches, Job
from peers.folders import listing

SHARD = 1 << 24


class Pictures(StreamingDataset):
    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.size_ = size

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return torch.from_numpy(cropping.decode(sample["jpg"], self.size_)), sample["label"]


@dataclass(frozen=True, slots=True)
class MosaicShards:
    output: str = cropping.OUTPUT

    def prepare(self, job: Job, work: Path) -> None:
        columns = {"jpg": "bytes", "label": "int"}
        with MDSWriter(out=str(work / "shards"), columns=columns, size_limit=SHARD) as writer:
            for path, label in zip(*listing(job.folder), strict=True):
                writer.write({"jpg": path.read_bytes(), "label": label})

    def open(self, job: Job, work: Path) -> Batches:
        dataset = Pictures(
            job.crop, local=str(work / "shards"), shuffle=True, shuffle_seed=job.seed,
            batch_size=job.batch,
        )  # fmt: skip
        return StreamingDataLoader(
            dataset, batch_size=job.batch, num_workers=job.workers, persistent_workers=True
        )
