"""Moves the tensors of a module between devices, where no plan does it.

    before the first step    all are on the host; metrics and `module.device` say the device
    between planned steps    each is at its home: resident ones on the GPU, streamed on the host
    a run without a plan     all are on the device, as in plain Lightning (`move`)

The tensor objects stay the same; only their `.data` changes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer
from torchmetrics import Metric

from offload.torch_seams import pytree
from trainers.lightning_seams import DeviceHolder, results, say_device

STEP = "step"
"""The optimizer's step counter. Torch wants it on the CPU unless its kernels are fused."""


def keep_on_host(module: torch.nn.Module, device: torch.device) -> None:
    """Keep the tensors on the host until a plan says where each one's home is. Metrics are computed
    after a step, on the device."""
    move(tensors_of(module), torch.device("cpu"))
    tell(module, device)


def tell(module: torch.nn.Module, device: torch.device) -> None:
    """Have `self.device` say this device, and move metrics there."""
    for part in module.modules():
        if isinstance(part, DeviceHolder):
            say_device(part, device)
        if isinstance(part, Metric):
            part.to(device)


def tensors_of(module: torch.nn.Module, optimizers: Iterable[Optimizer] = ()) -> list[torch.Tensor]:
    """Return the tensors that an eager step of the module computes with."""
    found: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        found[id(tensor)] = tensor
    groups = [(o, group) for o in optimizers for group in o.param_groups]
    for optimizer, group in groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and (key != STEP or group.get("fused")):
                    found[id(value)] = value
    return list(found.values())


@contextmanager
def _plainly() -> Iterator[None]:
    """Leave Lightning's inference mode: tensors that are made in it cannot be trained."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def move(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    with _plainly():
        for tensor in tensors:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
    bring_gradients(tensors)


def bring_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Have the gradient of each tensor on the device where the tensor is now."""
    with _plainly():
        for tensor in tensors:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None and gradient.device != tensor.device:
                tensor.grad = gradient.to(tensor.device)


def bring_along(trainer: L.Trainer, old: torch.device, new: torch.device) -> None:
    """Move what is still on a GPU that the run has left: what was logged, scores and averages of
    callbacks, tensors of the module that no step reads. What lies on the host stays there."""
    for loop in _loops(trainer):
        results(loop).to(new)
    if old.type == "cpu":
        return
    kept = [vars(callback) for callback in trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    for leaf in pytree.tree_leaves([trainer.model, trainer.callback_metrics, *map(dict, kept)]):
        part = isinstance(leaf, torch.nn.Module)
        tensors = tensors_of(leaf, trainer.optimizers) if part else [leaf]
        there = [t for t in tensors if isinstance(t, torch.Tensor) and t.device == old]
        move(there, new)


def forget_results(trainer: L.Trainer) -> None:
    """Drop the logged values, which have no bytes: Lightning would copy them at the end."""
    for loop in _loops(trainer):
        results(loop).clear()
    for told in (trainer.logged_metrics, trainer.progress_bar_metrics, trainer.callback_metrics):
        told.clear()


def _loops(trainer: L.Trainer) -> tuple[Any, ...]:
    fit, validate, test = trainer.fit_loop, trainer.validate_loop, trainer.test_loop
    return fit.epoch_loop, fit.epoch_loop.val_loop, validate, test
