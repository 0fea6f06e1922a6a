"""Batches that come on a GPU are those that come on the CPU, and come while it computes.

Skipped without a CUDA device; docs/gpu-status.md says when they last ran on one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_gpu import not_on_a_fake_gpu

from loaders import Device, ReuseLoader
from loaders.batching.device import DeviceFeed
from loaders.order.reuse import MODES
from loaders.pixels.augmentation import (
    Augmentation,
    Chain,
    Cutout,
    Flip,
    PadCrop,
    RandomResizedCrop,
)
from loaders.sources.datasets import PictureArrays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

SIDE = 40
SAMPLES = 50
LONG = 500_000_000
"""Clock cycles: about a quarter of a second."""

GEOMETRY: dict[str, Augmentation | None] = {
    "nothing": None,
    "flip": Flip(),
    "pad and crop": Chain([PadCrop(4), Flip(), Cutout(8)]),
    "resized crop": Chain([RandomResizedCrop(24), Flip(), Cutout(8)]),
    "larger": RandomResizedCrop(64, scale=(0.05, 0.3)),
}


class Pictures:
    """Rows of RGB pixels, as a decoder writes them, and what else a sample may hold."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        return {
            "picture": torch.from_numpy(pixels).permute(2, 0, 1),
            "label": index,
            "name": f"number {index}",
        }


def in_memory() -> PictureArrays:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (SAMPLES, SIDE, SIDE, 3), dtype=np.uint8)
    return PictureArrays(pixels, rng.integers(0, 10, SAMPLES), tuple("abcdefghij"))


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    """Of two passes; every batch of the first is kept until the end."""
    with ReuseLoader(dataset, 8, 3, workers=2, seed=5, **arguments) as loader:
        return [*loader, *loader]


def equal(there: Any, here: Any) -> bool:
    if isinstance(here, dict):
        return there.keys() == here.keys() and all(equal(there[k], here[k]) for k in here)
    if isinstance(here, list):
        return len(there) == len(here) and all(map(equal, there, here))
    if not isinstance(here, torch.Tensor):
        return bool(there == here)
    assert there.device.type == "cuda"
    return there.dtype == here.dtype and torch.equal(there.cpu(), here)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("dataset", [Pictures, in_memory])
def test_batches_on_the_gpu_are_the_batches_of_the_cpu(
    dataset: Callable[[], Any], pin_memory: bool, mode: Any
) -> None:
    augment = GEOMETRY["resized crop"]
    here = batches(dataset(), augment=augment, mode=mode)
    there = batches(dataset(), augment=augment, mode=mode, device="cuda", pin_memory=pin_memory)
    assert equal(there, here)


@pytest.mark.parametrize("augment", GEOMETRY.values(), ids=list(GEOMETRY))
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("dataset", [Pictures, in_memory])
def test_geometry_on_the_gpu_gives_the_bits_of_the_cpu(
    dataset: Callable[[], Any], pin_memory: bool, augment: Augmentation | None
) -> None:
    here = batches(dataset(), augment=augment)
    there = batches(
        dataset(), augment=augment, device=Device("cuda", augments=True), pin_memory=pin_memory
    )
    assert equal(there, here)


def test_pinned_batches_without_a_device_are_pinned_and_the_same() -> None:
    here, pinned = (batches(Pictures(), pin_memory=pin) for pin in (False, True))
    assert all(batch["picture"].is_pinned() for batch in pinned)
    assert all(torch.equal(a["picture"], b["picture"]) for a, b in zip(here, pinned, strict=True))


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("augments", [False, True])
def test_memory_is_not_used_again_before_the_gpu_is_done_with_it(
    augments: bool, pin_memory: bool
) -> None:
    """The GPU is far behind the consumer, which lets go of every batch at once."""
    augment = GEOMETRY["resized crop"]
    here = batches(Pictures(), augment=augment)
    there = []
    there_too: Any = {"device": Device("cuda", augments), "pin_memory": pin_memory}
    with ReuseLoader(Pictures(), 8, 3, workers=2, seed=5, augment=augment, **there_too) as loader:
        for _ in range(2):
            for batch in loader:
                torch.cuda._sleep(LONG // 50)
                there.append(batch["picture"].clone())
                del batch
    assert equal(there, [batch["picture"] for batch in here])


@pytest.mark.parametrize("reuse", [1, 3])
def test_a_pass_that_is_resumed_on_the_gpu_goes_on_as_on_the_cpu(reuse: int) -> None:
    arguments: dict[str, Any] = {"augment": GEOMETRY["resized crop"], "seed": 5, "workers": 2}
    with ReuseLoader(Pictures(), 8, reuse, **arguments) as whole:
        here = list(whole)
    arguments |= {"device": Device("cuda", augments=True)}
    with ReuseLoader(Pictures(), 8, reuse, **arguments) as first:
        served = iter(first)
        head = [next(served) for _ in range(3)]
        state = first.state_dict()
    with ReuseLoader(Pictures(), 8, reuse, **arguments) as second:
        second.load_state_dict(state)
        tail = list(second)
    assert equal(head + tail, here)


@not_on_a_fake_gpu("its streams take no time")
def test_a_batch_is_copied_while_the_step_before_it_runs() -> None:
    feed = DeviceFeed(torch.device("cuda"))
    pixels = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    feed.receive(feed.send(pixels, lambda batch: batch + 1))  # kernels are loaded now
    torch.cuda.synchronize()
    step = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    step.record()
    sent = feed.send(pixels, lambda batch: batch + 1)
    assert sent.event is not None
    sent.event.synchronize()
    assert not step.query(), "the copy waited for the step"
    assert torch.equal(feed.receive(sent).cpu(), pixels + 1)
