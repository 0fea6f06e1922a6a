"""What programs read of a DataLoader beside its batches: its sampler, its workers, its collate."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler, default_collate

Loader = Any
"""A `ReuseLoader`, whose module imports this one."""


class PassSampler(Sampler[int]):
    """The ids of this rank in the order in which the next pass reads them."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.data_source = loader.dataset

    def __iter__(self) -> Iterator[int]:
        loader = self._loader
        order = loader.order.of_pass(loader.position.pass_index)
        yield from order.ids(np.arange(len(order))).tolist()

    def __len__(self) -> int:
        return self._loader.share


class OrderedSampler(PassSampler, SequentialSampler):
    """That of a loader that does not shuffle. Only this class goes with Lightning's
    `overfit_batches`, which can put none in its place. (`LoaderCallback` stops the shuffling.)"""


class PassBatches(BatchSampler):
    """The ids of the batches that the next pass serves."""

    def __init__(self, loader: Loader, sampler: PassSampler) -> None:
        self._loader = loader
        super().__init__(sampler, loader.batch_size, loader.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader
        order = loader.order.of_pass(loader.position.pass_index)
        _, serves = loader.plan_of_next_pass().walk(0)
        for serve in islice(serves, len(self)):
            yield order.ids(serve.positions).tolist()

    def __len__(self) -> int:
        return len(self._loader)


class DataLoaderFace:
    """The attributes of a DataLoader, as they are for a `ReuseLoader`."""

    generator: torch.Generator | None = None
    """The order is a function of the seed and the pass."""
    in_order = True
    """The order never depends on which worker was faster."""

    @property
    def sampler(self: Loader) -> Any:
        """None: a stream has none."""
        listed, order = self.order.in_dataset is not None, self.setup.options.order
        source = getattr(order.sampler, "source", None)
        shuffled = order.shuffle or order.sampler is not None
        kind = PassSampler if shuffled else OrderedSampler
        return source or (kind(self) if listed else None)

    @property
    def batch_sampler(self: Loader) -> Any:
        """None: a stream has none."""
        sampler = self.sampler
        return PassBatches(self, sampler) if isinstance(sampler, PassSampler) else sampler

    @property
    def num_workers(self: Loader) -> int:
        return self.workers

    @property
    def collate_fn(self: Loader) -> Callable[[list[Any]], Any]:
        return self.setup.options.collate or default_collate

    @property
    def pin_memory(self: Loader) -> bool:
        return self.setup.options.pin_memory

    @property
    def timeout(self: Loader) -> float:
        return self.setup.options.workers.timeout or 0

    @property
    def worker_init_fn(self: Loader) -> Callable[[int], object] | None:
        return self.setup.options.workers.init

    @property
    def multiprocessing_context(self: Loader) -> str | None:
        return self.setup.options.workers.start_method

    @property
    def persistent_workers(self: Loader) -> bool:
        return self.workers > 0
