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
from offload.sizes import format_size


@dataclass(frozen=True, slots=True, eq=False)
class HomeMove:
    """The bytes of one home, where they go, and the tensors over them with their views there."""

    source: torch.Tensor
    target: torch.Tensor
    tensors: Sequence[torch.Tensor]
    views: Sequence[torch.Tensor]

    @property
    def on_host(self) -> bool:
        return self.source.device.type == "cpu" and self.target.device.type == "cpu"


def move_homes(
    moves: Sequence[HomeMove], synchronize: Callable[[], object], between: Callable[[], object]
) -> None:
    """Copy all of them. `synchronize` waits for copies of the device. `between` is called between
    two of them."""
    shifts = [
        Shift(p.source.data_ptr(), p.target.data_ptr(), p.source.nbytes, creeps=p.on_host)
        for p in moves
    ]
    kept: dict[int, torch.Tensor] = {}
    runs = False
    """Whether copies of a device may still run, which the host does not wait for."""
    for step in in_order(shifts):
        between()
        move = moves[step.number]
        if runs and (move.on_host or step.how in (ASIDE, BACK)):
            # The host copies at once, and a copy of the device may still read what it overwrites.
            synchronize()
            runs = False
        if step.how == ASIDE:
            kept[step.number] = away = move.source.to("cpu", copy=True)
            _point(move.tensors, [TensorLayout.from_tensor(t).view_of(away) for t in move.tensors])
        elif step.how == CREEPING:
            _creep(move)
        else:
            source = kept.pop(step.number) if step.how == BACK else move.source
            move.target.copy_(source, non_blocking=step.how != BACK)
            runs = runs or not move.on_host
            _point(move.tensors, move.views)
    synchronize()


def _creep(move: HomeMove) -> None:
    """Move bytes of the host to memory that overlaps theirs."""
    source, target = move.source, move.target
    try:
        memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        _point(move.tensors, move.views)
    except BaseException as error:
        error.add_note(
            f"it struck while {format_size(source.nbytes)} of tensors moved within the memory of"
            " the host: their values are lost. Go on from a checkpoint"
        )
        raise


def _point(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
