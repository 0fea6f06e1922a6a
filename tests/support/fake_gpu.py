"""What the fake GPU (fakecuda/) can do that a GPU cannot, and what it cannot say."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

FAKE = "FAKE_CUDA" in os.environ
"""Whether this process runs on the fake GPU."""
ILLEGAL_ADDRESS, LAUNCH_FAILURE = 700, 719
"""Errors after which a device is lost."""
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_called: list[object] = []
"""What streams and graphs may still call."""


def not_on_a_fake_gpu(why: str) -> pytest.MarkDecorator:
    """`why`: what the test needs of a real one."""
    return pytest.mark.skipif(FAKE, reason=f"needs a real GPU: {why}")


def only_on_a_fake_gpu(why: str) -> pytest.MarkDecorator:
    """`why`: what speaks against a real one."""
    return pytest.mark.skipif(not FAKE, reason=f"needs the fake GPU: {why}")


needs_late_streams = pytest.mark.skipif(
    FAKE and not os.environ.get("FAKE_CUDA_ASYNC"),
    reason="a stream of the fake GPU is late with FAKE_CUDA_ASYNC=1 alone",
)
needs_held_streams = pytest.mark.skipif(
    bool(os.environ.get("FAKE_CUDA_SHUFFLE")),
    reason="a graph whose nodes run in a random order holds no stream back",
)


def lose_device(error: int = ILLEGAL_ADDRESS, device: int = 0) -> None:
    """Have all later calls to a fake GPU fail, as after a kernel that read past its tensor."""
    _runtime().fakecuda_lose(device, error)


@contextmanager
def losable_device() -> Iterator[None]:
    """After this block all devices are there again."""
    try:
        yield
    finally:
        for device in range(torch.cuda.device_count()):
            lose_device(0, device)


def host_function(call: Callable[[], object]) -> None:
    """Have the current stream call this when it comes there. A graph calls it at every replay."""
    _called.append(_CALL(lambda _: call()))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert not _runtime().cudaLaunchHostFunc(stream, _called[-1], None)


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
