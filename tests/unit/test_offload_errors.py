"""Errors of the engine, whole in another process; and which of them say that a device is lost."""

import pickle
import re

import pytest
import torch

import offload
from offload import (
    BudgetTooSmall,
    CaptureError,
    DeviceLost,
    MemoryTooSmall,
    OffloadError,
    RaceFound,
    errors,
)
from offload.running.drivers.device_loss import device_lost

MODULE = "offload.errors"


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("no"),
        BudgetTooSmall("too small", needed=7, task="a"),
        MemoryTooSmall("too small", needed=7, left=3),
        RaceFound("a and b", "a", "b", (0, 1, 2)),
    ],
)
def test_an_error_comes_whole_out_of_another_process(error: OffloadError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_every_error_is_exported() -> None:
    ours = {n for n, e in vars(errors).items() if isinstance(e, type) and e.__module__ == MODULE}
    assert "MemoryTooSmall" in ours
    assert ours <= set(offload.__all__)
    assert all(getattr(offload, name) is getattr(errors, name) for name in ours)
    assert ours == set(re.findall(r"^ *([A-Z]\w+)(?:  .*)?$", errors.__doc__ or "", re.MULTILINE))


DEVICE = torch.device("cuda", 0)
SAYS = "CUDA error: {}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


@pytest.mark.parametrize(
    "said, told",
    [
        ("an illegal memory access was encountered", "an address that is not its own"),
        ("device-side assert triggered", "a target class out of range"),
        ("unspecified launch failure", "a kernel failed"),
        ("uncorrectable ECC error encountered", "ECC"),
    ],
)
def test_what_the_runtime_says_of_a_lost_device_is_told_with_what_to_do(
    said: str, told: str
) -> None:
    error = RuntimeError(SAYS.format(said))
    lost = device_lost(error, DEVICE)
    assert isinstance(lost, DeviceLost) and lost.__cause__ is error
    assert told in str(lost) and "cuda:0 is lost" in str(lost) and "checkpoint" in str(lost)


def test_the_number_of_an_error_goes_before_its_words() -> None:
    error = RuntimeError("CUDA error")
    error.error_code = 214  # type: ignore[attr-defined]
    assert "ECC" in str(device_lost(error, DEVICE))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SAYS.format("out of memory")),
        RuntimeError(SAYS.format("invalid argument")),
        torch.OutOfMemoryError("CUDA out of memory. an illegal memory access"),
        RuntimeError("an unknown error of mine"),
        ValueError("CUDA error: unspecified launch failure"),
        KeyboardInterrupt(),
    ],
)
def test_an_error_after_which_the_device_goes_on_is_none(error: BaseException) -> None:
    assert device_lost(error, DEVICE) is None


def test_what_came_of_a_lost_device_says_so_too() -> None:
    first = torch.AcceleratorError(SAYS.format("an illegal memory access was encountered"))
    wrapped, torn_down = OffloadError("memory was refused"), ValueError("cannot be torn down")
    wrapped.__cause__, torn_down.__context__ = first, wrapped
    assert isinstance(device_lost(torn_down, DEVICE), DeviceLost)
    torn_down.__context__ = DeviceLost("gone")
    assert device_lost(torn_down, DEVICE) is torn_down.__context__
    first.__context__, wrapped.__cause__ = None, KeyError("another")
    assert device_lost(wrapped, DEVICE) is None


def test_a_lost_device_is_told_once() -> None:
    lost = DeviceLost("gone")
    assert device_lost(lost, DEVICE) is lost


def test_errors_that_name_each_other_are_asked_once() -> None:
    """As Python makes them where one is raised again while another one is dealt with."""
    first, second = ValueError("a"), KeyError("b")
    first.__context__, second.__context__ = second, first
    assert device_lost(first, DEVICE) is None
    second.__cause__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert isinstance(device_lost(first, DEVICE), DeviceLost)
