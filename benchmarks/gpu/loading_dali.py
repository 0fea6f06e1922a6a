# pyright: basic, reportMissingImports=false
"""NVIDIA DALI on the GPU: read, decode (mixed), crop, resize, flip; uint8 [N, 3, S, S] there."""

from collections.abc import Callable, Iterator
from typing import Any, cast

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from peers.folders import listing

from gpu.loading_setting import SEED, Setting
from loaders.workers.machine import usable_cpus


@pipeline_def  # adds its own parameters
def pictures(paths: list[str], labels: list[int], size: int) -> Any:
    data, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, name="files")
    image = fn.decoders.image_random_crop(
        data, device="mixed", output_type=types.RGB, random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
    )  # fmt: skip
    image = fn.resize(image, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR)
    image = fn.flip(image, horizontal=fn.random.coin_flip())
    return fn.transpose(image, perm=[2, 0, 1]), label.gpu()


def passes(where: Setting) -> Callable[[], Iterator[Any]]:
    paths, labels = listing(where.folder)
    pipeline: Any = cast(Any, pictures)(
        [str(path) for path in paths], labels, where.side, batch_size=where.batch, device_id=0,
        num_threads=usable_cpus(), seed=SEED,
    )  # fmt: skip
    batches = DALIGenericIterator(
        [pipeline], ["image", "label"], reader_name="files", auto_reset=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )  # fmt: skip

    def one() -> Iterator[Any]:
        for [batch] in batches:
            yield batch["image"], batch["label"].flatten()

    return one
