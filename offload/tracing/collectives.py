"""Operations that several processes do together within a step: `all_reduce`, `all_gather`, ...

    the step's code          the tape                      every run
    y = all_reduce(x)   ->   all_reduce, lane of the ranks   all ranks begin it and wait for it
    wait_tensor(y)      ->   nothing                         y is there already

All ranks must begin the same collectives in the same order, whatever their plans are. So the
collectives of a step run one after the other (building.py chains them as it chains draws). None is
repeated, left out, or measured by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import distributed

from offload.errors import CaptureError, StepError
from offload.program.frames import say_frame, user_frame
from offload.program.trees import tensors_of
from offload.torch_seams import (
    OpOverload,
    finished_work,
    group_or_reduction,
    is_wrapper_subclass,
    pending_tensor,
    schema_of,
    wait_for_work,
    wait_tensor,
)

WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors"})
IN_PLACE = frozenset(
    f"c10d::{name}"
    for name in (
        *("broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_"),
        *("allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_"),
        *("_reduce_scatter_base_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_"),
        "barrier",
    )
)
"""The ops of `torch.distributed`. They write their first argument, although no schema says so, and
return a `Work` to wait for."""
FUNCTIONAL = frozenset(
    f"_c10d_functional::{name}"
    for name in (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_out", "broadcast", "broadcast_"),
        *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "all_to_all_single"),
        *("reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    )
)
"""Ops whose result is there once `wait_tensor` was called with it."""
NAMESPACES = ("c10d::", "_c10d_functional::", "_dtensor::", "symm_mem::", "offload_ranks::")


@cache
def is_wait(op: Any) -> bool:
    """Whether the op only waits for a collective, which is over as soon as it has run here."""
    return _name(op) in WAITS


@cache
def is_collective(op: Any) -> bool:
    """Whether the op needs other ranks to do something, too."""
    return _name(op).startswith(NAMESPACES) and not is_wait(op)


def written_by_collective(op: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that a collective writes in place although its schema does not say so."""
    is_barrier = _name(op) == "c10d::barrier"
    return tensors_of(args[0]) if _name(op) in IN_PLACE and not is_barrier else []


def traced(
    op: Any, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Any]:
    """The arguments of a collective as the tape keeps them, and what it returns in a trace, where
    nothing is sent."""
    name, where = _name(op), say_frame(user_frame())
    if name not in FUNCTIONAL | IN_PLACE:
        raise CaptureError(
            f"{where}: {name} has no place in an order that all ranks share, which a planned step"
            " needs. Use a collective such as all_reduce or all_gather, or call it outside of the"
            " step"
        )
    if device.type != "cpu":
        raise CaptureError(
            f"{where}: {name} on {device} cannot run inside a planned step yet. Call it outside of"
            " the step, or train without offloading"
        )
    if name in FUNCTIONAL:
        return [*args], op(*args, **kwargs)
    kept = [ScriptObject(one) if isinstance(one, torch.ScriptObject) else one for one in args]
    work = finished_work()
    return kept, (args[0], work) if len(schema_of(op).returns) > 1 else work


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor within one that waits for a collective. Other wrappers are refused by name."""
    pending = pending_tensor(tensor)
    if pending is None:
        check_own_bytes(tensor, f"{say_frame(user_frame())}: the step uses a tensor")
        return tensor
    return pending


def check_own_bytes(tensor: torch.Tensor, what: str) -> None:
    """Raise `CaptureError` for a DTensor and its like."""
    if is_wrapper_subclass(tensor):
        raise CaptureError(
            f"{what}, which is a {type(tensor).__name__} without bytes of its own, and a plan"
            " places bytes. Give the step plain tensors (of a DTensor: .to_local()), or train this"
            " module without offloading"
        )


@dataclass(frozen=True, slots=True)
class ScriptObject:
    """A process group or the kind of a reduction, which two traces describe alike."""

    object: Any

    def __repr__(self) -> str:
        return group_or_reduction(self.object)


@dataclass(frozen=True, slots=True)
class Collective:
    """Begins the op together with all other ranks, and waits until it is over."""

    op: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [one.object if isinstance(one, ScriptObject) else one for one in args]
        with together(None):
            result = self.op(*given, **kwargs)
            if _name(self.op) in FUNCTIONAL:
                for tensor in tensors_of(result):
                    wait_tensor(tensor)
                return result
            if result is not None:
                wait_for_work(result[-1] if isinstance(result, tuple) else result)
        return None


@contextmanager
def together(group: Any) -> Iterator[None]:
    """Say that another rank has ended or hangs, where torch raises a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise StepError(
            f"rank {distributed.get_rank(group)} waited for the others, and at least one of them"
            f" has ended or hangs. Look at its output. ({str(error).splitlines()[0][:200]})"
        ) from error


def _name(op: Any) -> str:
    return schema_of(op).name if isinstance(op, OpOverload) else ""
