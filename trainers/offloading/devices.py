"""Moves the tensors of a module and its trainer between devices, where no plan does it.

    before the first step    all are on the host; metrics and `module.device` name the device
    between planned steps    each is at its home: resident ones on the GPU, streamed on the host
    a run without a plan     all are on the device, as in plain Lightning (`move`)

The tensor objects stay the same; only their `.data` changes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer
from torchmetrics import Metric

from offload.torch_seams import pytree
from trainers.lightning_seams import DeviceHolder, results, set_module_device

STEP = "step"
"""The optimizer's step counter. Torch wants it on the CPU unless its kernels are fused."""


def keep_on_host(module: torch.nn.Module, device: torch.device) -> None:
    """Keep the tensors on the host until a plan places them. Metrics are computed after a step, on
    the device."""
    move(step_tensors(module), torch.device("cpu"))
    set_device(module, device)


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Set `self.device` of the module and its parts, and move metrics to that device."""
    for part in module.modules():
        if isinstance(part, DeviceHolder):
            set_module_device(part, device)
        if isinstance(part, Metric):
            part.to(device)


def step_tensors(
    module: torch.nn.Module, optimizers: Iterable[Optimizer] = ()
) -> list[torch.Tensor]:
    """Return the tensors that an eager step of the module computes with."""
    tensors: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        tensors[id(tensor)] = tensor
    groups = [(o, group) for o in optimizers for group in o.param_groups]
    for optimizer, group in groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and (key != STEP or group.get("fused")):
                    tensors[id(value)] = value
    return list(tensors.values())


@contextmanager
def _trainable_results() -> Iterator[None]:
    """Leave Lightning's inference mode: tensors that are made in it cannot be trained."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def move(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    with _trainable_results():
        for tensor in tensors:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
    move_gradients(tensors)


def move_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Move the gradient of each tensor to the device of the tensor."""
    with _trainable_results():
        for tensor in tensors:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None and gradient.device != tensor.device:
                tensor.grad = gradient.to(tensor.device)


def move_run(
    module: L.LightningModule,
    tensors: Sequence[torch.Tensor],
    plugin: Precision,
    old: torch.device,
    new: torch.device,
) -> None:
    """Have a run go on as one of another device. `tensors`, those of its steps, stay where they are
    until a plan moves them, and their gradients come to them."""
    if isinstance(plugin, MixedPrecision):
        plugin.device = new.type
    set_device(module, new)
    copy_generator_state(old, new)
    _move_trainer_state(module.trainer, old, new)
    move_gradients(tensors)


def _move_trainer_state(trainer: L.Trainer, old: torch.device, new: torch.device) -> None:
    """Move what is still on a GPU that the run has left: logged values, scores and averages of
    callbacks, tensors of the module that no step reads. Tensors on the host stay there."""
    for loop in _loops(trainer):
        results(loop).to(new)
    if old.type == "cpu":
        return
    states = [vars(callback) for callback in trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    for leaf in pytree.tree_leaves([trainer.model, trainer.callback_metrics, *map(dict, states)]):
        part = isinstance(leaf, torch.nn.Module)
        tensors = step_tensors(leaf, trainer.optimizers) if part else [leaf]
        move([t for t in tensors if isinstance(t, torch.Tensor) and t.device == old], new)


def copy_generator_state(old: torch.device, new: torch.device) -> None:
    """Have steps on the new device draw what they would have drawn on the old one. The generators
    of a GPU and of the CPU differ in kind, so each of them keeps its own state: that of a device on
    which nothing was drawn yet comes from the seed of the run."""
    if old != new and old.type == new.type == "cuda":
        torch.cuda.set_rng_state(torch.cuda.get_rng_state(old), new)


def drop_results(trainer: L.Trainer) -> None:
    """Drop the logged values, which have no bytes: Lightning would copy them at the end."""
    for loop in _loops(trainer):
        results(loop).clear()
    logged = trainer.logged_metrics, trainer.progress_bar_metrics, trainer.callback_metrics
    for metrics in logged:
        metrics.clear()


def _loops(trainer: L.Trainer) -> tuple[Any, ...]:
    fit, validate, test = trainer.fit_loop, trainer.validate_loop, trainer.test_loop
    return fit.epoch_loop, fit.epoch_loop.val_loop, validate, test
