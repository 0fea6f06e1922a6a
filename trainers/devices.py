"""On which device the tensors of a module are, when the plan is not the one who says so.

    before the first step    all on the host; but for metrics, and what `module.device` says
    between planned steps    each where its home is: resident ones on the GPU, streamed ones not
    an eager step            all in one place (`Away`): the device, or the host where a budget is
                             kept; then each at home again, with the values of now
    a run without a plan     all on the device, as plain Lightning has them (`move`)

Tensors stay the objects that they were: only `.data` changes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch.optim import Optimizer
from torchmetrics import Metric

STEP = "step"
"""The optimizer's counter: torch wants it on the CPU, but for fused kernels."""


def keep_on_host(module: torch.nn.Module, device: torch.device) -> None:
    """Until a plan says where each tensor's home is. What is computed after a step, metrics, is
    computed on the device."""
    move(tensors_of(module), torch.device("cpu"))
    tell(module, device)


def tell(module: torch.nn.Module, device: torch.device) -> None:
    """What `self.device` says, and where metrics are."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device
        if isinstance(part, Metric):
            part.to(device)


def tensors_of(module: torch.nn.Module, optimizers: Iterable[Optimizer] = ()) -> list[torch.Tensor]:
    """That an eager step of the module computes with."""
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
    """Also in Lightning's inference mode: what is made there is of no use to training."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    with _plainly():
        for tensor in tensors:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)


class Away:
    """These are on `device` until `back`, and were where their homes are."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        self._homes: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with _plainly():
                for tensor in tensors:
                    if tensor.device != device:
                        home = tensor.data
                        tensor.data = home.to(device)
                        self._homes.append((tensor, home))
        except BaseException:  # no memory
            self.back()
            raise

    def back(self) -> None:
        """With the values that they have now."""
        homes, self._homes = self._homes, []
        with _plainly():
            for tensor, home in homes:
                home.copy_(tensor.data)
                tensor.data = home


def forget_results(trainer: L.Trainer) -> None:
    """What was logged and is on a lost device: Lightning would move it to the host at the end."""
    fit, validate, test = trainer.fit_loop, trainer.validate_loop, trainer.test_loop
    for loop in (fit.epoch_loop, fit.epoch_loop.val_loop, validate, test):
        loop._results.clear()


@contextmanager
def all_on(module: L.LightningModule, device: torch.device) -> Iterator[None]:
    """For a step that is not planned: the module, its metrics, and what `self.device` says."""
    before: Any = module.device
    away = Away(tensors_of(module), device)
    try:
        tell(module, device)
        yield
    finally:
        tell(module, before)
        away.back()
