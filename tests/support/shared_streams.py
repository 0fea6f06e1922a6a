"""Small loaders to share, and what is served of them."""

import pickle
from collections import deque
from typing import Any

import pytest
import torch
from support.loader_datasets import Pictures, served

from loaders import ReuseLoader, Workers
from loaders.sharing.remote_view import RemoteView

SIZE, BATCH = 24, 4
BATCHES = SIZE // BATCH


class Counted(Pictures):
    """Counts what is read of it, and fails at some samples."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__(size, bad)
        self.reads: deque[int] = deque()  # a list would be a change of the data set

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads.append(index)
        return super().__getitem__(index)


def lone(**options: Any) -> ReuseLoader:
    # In threads, so that `reads` is told here.
    options["workers"] = Workers(2, "thread").changed_by(options.get("workers", Workers()))
    usual: dict[str, Any] = {"batch_size": BATCH, "reuse": 1, "buffer_batches": 3}
    return ReuseLoader(options.pop("dataset", None) or Counted(SIZE), **{**usual, **options})


def passes(loader: Any, number: int) -> list[Any]:
    return [batch for _ in range(number) for batch in served(loader)]


def sent(view: RemoteView) -> RemoteView:
    return pickle.loads(pickle.dumps(view))


def story_of_a_bad_sample(loader: Any) -> list[Any]:
    """What two passes serve, and where each ends, if reading sample 9 fails."""
    told: list[Any] = []
    for _ in range(2):
        with pytest.raises(OSError, match="sector 9"):
            for _, ids in loader:
                told.append(ids.tolist())
        told.append(loader.state_dict()["served_batches"])
    return told
