"""A pipeline of albumentations, where a worker process can import it."""

from typing import Any

import albumentations  # pyright: ignore[reportMissingImports]
import numpy as np
from support.serve_functions import HEIGHT, WIDTH, pixels

pipeline = albumentations.Compose(
    [albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)],
    bbox_params=albumentations.BboxParams("pascal_voc", label_fields=["labels"]),
)


class Boxed:
    """Pictures whose mask is their first channel, and with a box around what is white in their
    second one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture = pixels(index)
        left, top = index % 5, index % 4
        picture[..., 1] = 0
        picture[top : top + 3, left : left + 4, 1] = 255
        assert top + 3 <= HEIGHT and left + 4 <= WIDTH
        return {
            "image": picture,
            "mask": picture[..., 0].copy(),
            "boxes": np.array([[left, top, left + 4, top + 3]], dtype=np.float32),
            "labels": np.array([index]),
        }


def moved(sample: dict[str, Any]) -> dict[str, Any]:
    made = pipeline(
        image=sample["image"], mask=sample["mask"], bboxes=sample["boxes"], labels=sample["labels"]
    )
    return {
        "image": made["image"],
        "mask": made["mask"],
        "boxes": np.asarray(made["bboxes"], dtype=np.float32),
        "labels": np.asarray(made["labels"], dtype=np.int64),
    }
