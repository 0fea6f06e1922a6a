"""What part g takes batches from: ours in every setting, two places the loader has not, DALI.

    source.open(setting) -> a function; each call of it is a pass: (uint8 [N, 3, S, S], labels)
                            on the device, ready for the current stream

`PageLocked`: decoded pictures that the device gathers itself over the link, out of memory that it
may read (registered with the driver); the host touches no pixel. `OnDevice`: all of them there.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.loading_setting import SEED, Setting, drawn_pictures
from loaders import Device, ReuseLoader
from loaders.pixels.augmentation import Draws, draw_keys
from loaders.sources.datasets import PictureArrays, picture_folder

Pass = Callable[[], Iterator[Any]]
PORTABLE_MAPPED = 3
"""cudaHostRegister's flags: for every context, and in the device's address space."""


@dataclass(frozen=True, slots=True)
class Source:
    note: str
    open: Callable[[Setting], AbstractContextManager[Pass]]
    data: tuple[str, ...] = ("cifar10", "photos")
    needs: tuple[str, ...] = ()
    on_cpu: bool = True

    def refused(self, where: Setting) -> str:
        gone = [name for name in self.needs if not _there(name)]
        if gone:
            return f"not installed: {', '.join(gone)} (benchmarks/gpu/wheels.sh)"
        return "" if self.on_cpu or where.device != "cpu" else "needs a CUDA device"


def _there(name: str) -> bool:
    parent = name.partition(".")[0]
    return find_spec(parent) is not None and find_spec(name) is not None


@dataclass(frozen=True, slots=True)
class Ours:
    """`ReuseLoader` with these arguments."""

    options: Mapping[str, Any] = field(default_factory=dict)
    ahead: bool = True
    """False: copied in the loop, as one would without a loader that does it."""
    backend: str = "native"
    augments: bool = False
    """Whether the GPU augments."""

    @contextmanager
    def __call__(self, where: Setting) -> Iterator[Pass]:
        options: dict[str, Any] = {"reuse": 1, **self.options}
        if self.ahead:
            options["device"] = Device(where.device, self.augments)
        loader = ReuseLoader(
            self._dataset(where), where.batch, augment=where.augment, seed=SEED, **options
        )
        try:
            yield partial_pass(loader, where, self.ahead)
        finally:
            loader.close()

    def _dataset(self, where: Setting) -> Any:
        if where.data == "cifar10":
            pixels, labels = drawn_pictures(where, where.side)
            return PictureArrays(pixels, labels, tuple("0123456789"))
        if self.backend == "dali":
            from loaders.backends import open_source

            return open_source(where.folder, backend="dali")
        return picture_folder(where.folder, None)


def partial_pass(loader: ReuseLoader, where: Setting, ahead: bool) -> Pass:
    def batches() -> Iterator[Any]:
        for batch in loader:
            pictures, labels = batch[0], batch[1]
            if not ahead:
                pictures, labels = pictures.to(where.device), labels.to(where.device)
            yield pictures, labels

    return batches


@contextmanager
def on_device(where: Setting) -> Iterator[Pass]:
    """All decoded pictures on the device."""
    pixels, labels = drawn_pictures(where, _stored(where))
    yield _gathering(torch.from_numpy(pixels).to(where.device), labels, where)


@contextmanager
def page_locked(where: Setting) -> Iterator[Pass]:
    """All decoded pictures in registered host memory, of which the device has a view."""
    pixels, labels = drawn_pictures(where, _stored(where))
    if where.device == "cpu":
        yield _gathering(torch.from_numpy(pixels), labels, where)
        return
    runtime: Any = torch.cuda.cudart()
    torch.cuda.init()
    result = runtime.cudaHostRegister(pixels.ctypes.data, pixels.nbytes, PORTABLE_MAPPED)
    if int(result):
        raise RuntimeError(f"cudaHostRegister of {pixels.nbytes} bytes answers {int(result)}")
    try:
        yield _gathering(torch.as_tensor(SeenByDevice(pixels), device="cuda"), labels, where)
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(pixels.ctypes.data)


class SeenByDevice:
    """Registered host memory under the address that it has for both (unified addressing)."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": "|u1", "version": 3,
            "data": (array.ctypes.data, False),
        }  # fmt: skip


def _stored(where: Setting) -> int:
    """Photos lie there as squares of about as many pixels as they have."""
    return where.side if where.data == "cifar10" else round(where.side * 1.9)


def _gathering(pixels: torch.Tensor, labels: NDArray[np.int64], where: Setting) -> Pass:
    """A pass in a fresh order: rows taken by the device, augmented there."""
    answers = torch.from_numpy(labels).to(where.device)
    passes = iter(range(1 << 30))

    def batches() -> Iterator[Any]:
        number = next(passes)
        order = np.random.default_rng((SEED, number)).permutation(where.pictures)
        for start in range(0, where.pictures, where.batch):
            ids = order[start : start + where.batch]
            at = torch.from_numpy(ids).to(where.device)
            pictures = torch.index_select(pixels, 0, at).permute(0, 3, 1, 2)
            draws = Draws(draw_keys(SEED, number, ids, np.zeros_like(ids)))
            yield where.augment(pictures, draws), answers[at]

    return batches


@contextmanager
def dali_alone(where: Setting) -> Iterator[Pass]:
    """DALI by itself: decode, crop, resize and flip on the GPU, batches stay there."""
    from gpu.loading_dali import passes

    yield passes(where)


SOURCES: Mapping[str, Source] = {
    "ours, augmented on the CPU": Source("`device=`: one batch ahead, on a stream", Ours()),
    "ours, page-locked batches": Source("the same, `pin_memory=True`", Ours({"pin_memory": True})),
    "ours, augmented on the device": Source(
        "`Device(augments=True)`, `pin_memory=True`",
        Ours({"pin_memory": True}, augments=True), data=("cifar10",),
    ),
    "ours, copied in the loop": Source("no `device=`: `.to()` before each step", Ours(ahead=False)),
    "ours, reuse 3": Source("decoded once, served three times", Ours({"reuse": 3})),
    "ours, reuse 3, page-locked": Source(
        "the same, `pin_memory=True`", Ours({"reuse": 3, "pin_memory": True})
    ),
    "ours, DALI decodes on the device": Source(
        "`backend='dali'` (mixed), back into the slab", Ours(backend="dali"), data=("photos",),
        needs=("nvidia.dali",), on_cpu=False,
    ),
    "DALI alone, on the device": Source(
        "its own pipeline: nothing comes back to the host", dali_alone, data=("photos",),
        needs=("nvidia.dali",), on_cpu=False,
    ),
    "page-locked pictures, gathered by the device": Source(
        "decoded before; no feature of the loader: what one could bring", page_locked
    ),
    "pictures on the device, gathered there": Source(
        "decoded before; no feature of the loader: what one could bring", on_device
    ),
}  # fmt: skip
