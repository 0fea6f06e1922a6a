"""All pipelines, in the order of the tables."""

from surveyed_pipelines import (
    hub_pipelines,
    joint_pipelines,
    picture_pipelines,
    sequence_pipelines,
    stream_pipelines,
    view_pipelines,
    worker_pipelines,
)
from surveyed_pipelines.pipeline_case import Pipeline

TABLES: dict[str, tuple[Pipeline, ...]] = {
    "Pictures and their classes": (*picture_pipelines.CASES, *worker_pipelines.CASES),
    "Masks, boxes, key points": joint_pipelines.CASES,
    "Several views": view_pipelines.CASES,
    "Text, sound, video, volumes, tables": sequence_pipelines.CASES,
    "Streams and Hugging Face": (*stream_pipelines.CASES, *hub_pipelines.CASES),
}
LIBRARIES = (
    "torchvision", "timm", "lightly", "albumentations", "kornia", "datasets", "transformers",
    "webdataset", "pandas", "lmdb",
)  # fmt: skip
SMOKE = "CIFAR-10 v1", "SimCLR, two views"


def pipelines() -> dict[str, Pipeline]:
    return {case.name: case for table in TABLES.values() for case in table}
