"""Checks of what a runner is given: a stage that fits its step, a batch that fits its plan."""

from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import StepError
from offload.program.kernels import Program
from offload.running.stage import Stage

Shape = tuple[tuple[int, ...], ...]


def check_stage(stage: Stage | None, program: Program, **given: Any) -> None:
    """Raise `ValueError` unless a shared stage fits the step, and `given` has nothing that the
    stage decides."""
    if stage is None:
        return
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} has no effect beside a stage: give it to Stage(...)"
            )
    here, wanted = stage.device, program.device  # the latter may leave its number open
    if here.type != wanted.type or wanted.index not in (None, here.index):
        raise ValueError(
            f"the step was captured on {wanted}, the stage has {here}:"
            " make a Stage of the step's device"
        )


def shape_of(batch: Sequence[Any], program: Program) -> Shape:
    """The shape of a batch; raises `StepError` where the batch does not fit this step."""
    wanted = program.inputs
    if len(batch) != len(wanted):
        raise StepError(f"{len(batch)} tensors were given; the step takes {len(wanted)}")
    for number, (given, value) in enumerate(zip(batch, wanted, strict=True)):
        if not isinstance(given, torch.Tensor):
            raise StepError(f"input {number} is a {type(given).__name__}; a tensor is expected")
        if given.dtype != value.dtype or given.device.type not in ("cpu", program.device.type):
            raise StepError(
                f"input {number} is {given.dtype} on {given.device}; {value.dtype} on"
                f" {program.device} is expected"
            )
    return tuple(tuple(given.shape) for given in batch)
