"""Copies tensors from one home to another where the two may share their memory.

    old home --copy--> new home, and the tensors point there       in the order of shifts.py

At every moment each tensor points to bytes that are its own, so a Ctrl-C in the middle loses none.
Only bytes of the host that move by less than their length are written over as they move; a Ctrl-C
that hits one of these copies says so.
"""

from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass

import torch

from offload.memory.shifts import ASIDE, BACK, CREEPING, Shift, in_order
from offload.memory.tensor_layout import TensorLayout
from offload.sizes import say_size


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """The bytes of one home, where they go, and the tensors over them with their views there."""

    source: torch.Tensor
    target: torch.Tensor
    tensors: Sequence[torch.Tensor]
    views: Sequence[torch.Tensor]

    @property
    def on_host(self) -> bool:
        return self.source.device.type == "cpu" and self.target.device.type == "cpu"


def carry(
    passages: Sequence[Passage], rest: Callable[[], object], between: Callable[[], object]
) -> None:
    """Copy all of them. `rest` waits for copies of the device. `between` is called between two."""
    shifts = [
        Shift(p.source.data_ptr(), p.target.data_ptr(), p.source.nbytes, creeps=p.on_host)
        for p in passages
    ]
    kept: dict[int, torch.Tensor] = {}
    runs = False
    """Whether copies of a device may still run, which the host does not wait for."""
    for step in in_order(shifts):
        between()
        passage = passages[step.number]
        if runs and (passage.on_host or step.how in (ASIDE, BACK)):
            rest()  # the host copies at once, and such a copy may still read what it overwrites
            runs = False
        if step.how == ASIDE:
            kept[step.number] = away = passage.source.to("cpu", copy=True)
            _point(passage.tensors, [TensorLayout.of(t).over(away) for t in passage.tensors])
        elif step.how == CREEPING:
            _creep(passage)
        else:
            source = kept.pop(step.number) if step.how == BACK else passage.source
            passage.target.copy_(source, non_blocking=step.how != BACK)
            runs = runs or not passage.on_host
            _point(passage.tensors, passage.views)
    rest()


def _creep(passage: Passage) -> None:
    """Move bytes of the host to memory that overlaps theirs."""
    source, target = passage.source, passage.target
    try:
        memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        _point(passage.tensors, passage.views)
    except BaseException as error:
        error.add_note(
            f"it struck while {say_size(source.nbytes)} of tensors moved within the memory of the"
            " host: their values are lost. Go on from a checkpoint"
        )
        raise


def _point(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
