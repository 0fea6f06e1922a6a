"""A loader that is dropped lets go of its data set at once: nothing of ours waits for the collector
of cycles."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loaders import ReuseLoader
from loaders.options import WorkerKind, Workers
from loaders.pixels.augmentation import Flip

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4, 4, dtype=torch.uint8), index


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def nothing(loader: ReuseLoader) -> None:
    """Read nothing."""


def a_whole_pass(loader: ReuseLoader) -> None:
    assert len(list(loader)) == len(loader)


def a_pass_left_open(loader: ReuseLoader) -> Any:
    left = iter(loader)
    next(left)
    return left


def made(kind: WorkerKind, workers: int, **options: Any) -> Callable[[Pictures], ReuseLoader]:
    kinds = Workers(workers, kind)
    return lambda pictures: ReuseLoader(pictures, batch_size=4, workers=kinds, **options)


def adopted(pictures: Pictures) -> ReuseLoader:
    return ReuseLoader.from_dataloader(DataLoader(pictures, 4, num_workers=1), reuse=2)


class Breaks(Pictures):
    """After twelve reads its error runs the collector where it is built again."""

    dropped, collected = threading.Event(), threading.Event()
    reads = 0

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)  # so that a worker reads one sample at a time
        self.reads += 1
        if self.reads > 12:
            raise CollectorRuns
        return super().__getitem__(index)


class CollectorRuns(Exception):
    def __reduce__(self) -> Any:
        return run_collector, ()


def run_collector() -> Exception:
    assert Breaks.dropped.wait(20)
    gc.collect()
    Breaks.collected.set()
    return ValueError("broken")


def test_a_pass_that_is_collected_on_its_own_worker_is_ended_elsewhere() -> None:
    """The worker is at the process that ends with the pass, and would wait for itself."""
    with made("process", 1, reuse=2)(Breaks()) as loader:
        held = SimpleNamespace(batches=iter(loader))
        held.me = held
        next(held.batches)
        del held
        Breaks.dropped.set()
        assert Breaks.collected.wait(4)


MAKERS = {
    "threads": made("thread", 2, reuse=3, augment=Flip()),
    "the loop itself": made("auto", 0, reuse=2),
    "processes": made("process", 1, reuse=2, augment=Flip()),
    "torch's DataLoader": made("process", 1, reuse=1),
    "adopted": adopted,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("use", [nothing, a_whole_pass, a_pass_left_open])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_a_data_set_goes_with_its_loader(
    make: Callable[[Pictures], ReuseLoader], use: Callable[[ReuseLoader], Any], closed: bool
) -> None:
    pictures = Pictures()
    there, loader = weakref.ref(pictures), make(pictures)
    kept = use(loader)
    if closed:
        loader.close()
    del pictures, loader, kept
    assert there() is None
    assert not [t for t in threading.enumerate() if t.name.startswith("perfect-")]
