"""A module on a device that may have no room for it: its tensors are there, without their bytes.

a parameter    where it was            its bytes
within         looks like the device   none: they stay where they were, and plans move them
afterwards     where it was            its present bytes

So are the states of its optimizers, of which some are made within.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.kernels import CPU
from offload.torch_seams import is_wrapper_subclass

Device = torch.device | str | None

STEP = "step"
"""An optimizer's counter. Torch wants it on the CPU unless its kernels are fused or captured."""


def device_of(
    device: Device, batch: Sequence[torch.Tensor], others: Iterable[torch.Tensor]
) -> torch.device:
    """The device of a step. By default where all its tensors are; single numbers on the CPU do not
    count."""
    if device is not None:
        return _number_device(torch.device(device))
    devices = dict.fromkeys(t.device for t in (*batch, *others) if t.dim() or t.device != CPU)
    if len(devices) > 1:
        raise CaptureError(
            f"the step's tensors lie on {' and '.join(sorted(map(str, devices)))}. Name the device"
            " that it shall run on, as in capture(..., device='cuda:0'); the tensors may stay"
            " where they are"
        )
    return next(iter(devices), CPU)


def _number_device(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(f"device {device}: a step can only be captured for cpu or cuda")
    if device.type == "cpu":
        return CPU
    if device.index is not None:
        return device
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index)


@contextmanager
def place_tensors(
    core: Any,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
) -> Iterator[Mapping[torch.Tensor, Any]]:
    """Within it, all of these tensors are on the device. Yields what stands for those that were
    elsewhere: a tensor's number, itself and its home."""
    states = [state for state, _ in list_states(optimizers)]
    everything = dict.fromkeys((*module.parameters(), *module.buffers(), *states))
    tensors = [tensor for tensor in everything if tensor.device.type != device.type]
    for tensor in tensors:
        _check_own_bytes(tensor, f"the module has a tensor that is not on {device}")
    before = {tensor: tensor.device for tensor in tensors}
    places = dict(zip(tensors, core.place([t.data for t in tensors], str(device)), strict=True))
    for tensor, place in places.items():
        tensor.data = place.tensor
    yield places
    made = {state: before[p] for state, p in list_states(optimizers) if p in before}
    adopted = {*core.adopted()}
    for tensor, where in (made | before).items():
        place = places.get(tensor)
        at_home = (
            place is not None
            and place.id in adopted
            and core.identity(tensor) == core.identity(place.tensor)
        )
        tensor.data = _bytes_at_home(place) if at_home else tensor.data.to(where)


def _check_own_bytes(tensor: torch.Tensor, what: str) -> None:
    """Raise `CaptureError` for a DTensor and its like."""
    if is_wrapper_subclass(tensor):
        raise CaptureError(
            f"{what}, which is a {type(tensor).__name__} without bytes of its own, and a plan"
            " places bytes. Give the step plain tensors (of a DTensor: .to_local()), or train this"
            " module without offloading"
        )


def list_states(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The states that are where their parameter is, and the parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts_there = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                for key, state in optimizer.state.get(parameter, {}).items():
                    if isinstance(state, torch.Tensor) and (key != STEP or counts_there):
                        yield state, parameter


def _bytes_at_home(place: Any) -> torch.Tensor:
    like = place.tensor
    whole = place.home.view(like.dtype)
    return whole.as_strided(like.size(), like.stride(), like.storage_offset())
