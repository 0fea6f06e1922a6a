"""Finds out whether an exception says that this process has lost its device.

    a kernel reads past its tensor --> every later call fails, with the first one's error
    out of memory                  --> the next call works: the device is not lost

A process cannot recover from such a ("sticky") error: nothing on the device can be read any more,
so nothing may be copied from it, and least of all into a checkpoint. An error that was caused by a
sticky one, or was raised while it was handled, counts as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch

from offload.errors import DeviceLost

LOST: Mapping[int, str] = MappingProxyType(
    {
        46: "the device is taken by another process",
        100: "the device is no longer there",
        101: "the device is no longer there",
        214: "its memory had an error that could not be corrected (ECC)",
        220: "its NVLink had an error that could not be corrected",
        700: "a kernel used an address that is not its own",
        702: "a kernel took longer than this device allows",
        709: "its context was destroyed",
        710: "an assertion in a kernel failed: an index or a target class out of range, say",
        714: "a kernel's stack failed",
        715: "a kernel had an illegal instruction",
        716: "a kernel used a misaligned address",
        717: "a kernel used an address of another kind of memory",
        718: "a kernel jumped to an address that is not its own",
        719: "a kernel failed",
        999: "the driver does not say why",
    }
)
"""What happened, by the number of the CUDA error."""
MESSAGES: Mapping[str, int] = MappingProxyType(
    {
        "all CUDA-capable devices are busy": 46,
        "no CUDA-capable device": 100,
        "uncorrectable ECC error": 214,
        "uncorrectable NVLink error": 220,
        "illegal memory access": 700,
        "the launch timed out": 702,
        "context is destroyed": 709,
        "device-side assert triggered": 710,
        "hardware stack error": 714,
        "illegal instruction": 715,
        "misaligned address": 716,
        "operation not supported on global/shared address space": 717,
        "invalid program counter": 718,
        "unspecified launch failure": 719,
        "unknown error": 999,
    }
)
"""The runtime's words in torch's message, for errors that carry no number."""


def device_lost(error: BaseException, *devices: torch.device) -> DeviceLost | None:
    """The error to raise instead of `error`; None if none of the devices is lost."""
    for cause in _and_those_before(error):
        if isinstance(cause, DeviceLost):
            return cause
        code = _code(cause)
        if code is not None and code in LOST:
            where = " or ".join(map(str, _find_silent(devices)))
            lost = DeviceLost(
                f"{where} is lost: {LOST[code]} (CUDA error {code}). What was on it cannot be read"
                " any more, so nothing of this step, or since the last checkpoint, can be saved."
                " Start a new process from the last checkpoint; CUDA_LAUNCH_BLOCKING=1 names the"
                " call"
            )
            lost.__cause__ = cause
            return lost
    return None


@contextmanager
def naming_loss(*devices: torch.device) -> Iterator[None]:
    """Raise `DeviceLost` instead of an error of this block that says so. A kernel of an earlier
    step may have caused it."""
    try:
        yield
    except Exception as error:
        lost = device_lost(error, *devices)
        if lost is None or lost is error:
            raise
        raise lost from lost.__cause__


def _find_silent(devices: Sequence[torch.device]) -> Sequence[torch.device]:
    """Those of several devices that answer no more; all of them if none says so by itself."""
    if len(devices) == 1:
        return devices
    return [device for device in devices if not _answers(device)] or devices


def _answers(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _and_those_before(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, each once: two errors may name each other."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        cause = left.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            left += [cause.__context__, cause.__cause__]


def _code(error: BaseException) -> int | None:
    """The number of the CUDA error: `torch.AcceleratorError` has it, others say it in words."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and isinstance(error, RuntimeError):
        return code
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return None
    message = str(error)
    if "CUDA" not in message:
        return None
    return next((code for words, code in MESSAGES.items() if words in message), None)
