"""Small loaders to share, and what is served of them."""

from typing import Any

import torch
from support.loader_datasets import Pictures, served

from loaders import ReuseLoader

SIZE, BATCH = 24, 4
BATCHES = SIZE // BATCH


class Counted(Pictures):
    """Counts what is read of it, and fails at some samples."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__(size, bad)
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads.append(index)
        return super().__getitem__(index)


def lone(**options: Any) -> ReuseLoader:
    usual: dict[str, Any] = {"batch_size": BATCH, "reuse": 1, "workers": 2}
    return ReuseLoader(options.pop("dataset", None) or Counted(SIZE), **{**usual, **options})


def passes(loader: Any, number: int) -> list[Any]:
    return [batch for _ in range(number) for batch in served(loader)]
