"""Operations that several processes do together within a step: `all_reduce`, `all_gather`, ...

    the step's code          the tape                      every run
    y = all_reduce(x)   ->   all_reduce, lane of the ranks   all ranks begin it and wait for it
    wait_tensor(y)      ->   wait_tensor                     y is there already

All ranks must begin the same collectives in the same order, whatever their plans are. So the
collectives of a step run one after the other (graphs.py chains them as it chains draws). None is
repeated, left out, or measured by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import distributed

from offload.errors import CaptureError, StepError
from offload.program.trees import tensors_of
from offload.torch_seams import (
    OpOverload,
    is_wrapper_subclass,
    schema_of,
    wait_for_work,
    wait_tensor,
)

FUNCTIONAL = "_c10d_functional::"
"""Of ops whose result is there once `wait_tensor` was called with it."""
NAMESPACES = ("c10d::", FUNCTIONAL, "_dtensor::", "symm_mem::", "offload_ranks::")


@cache
def is_collective(op: Any) -> bool:
    """Whether the op needs other ranks to do something, too."""
    name = _name(op)
    return name.startswith(NAMESPACES) and not name.startswith(f"{FUNCTIONAL}wait_tensor")


def check_own_bytes(tensor: torch.Tensor, what: str) -> None:
    """Raise `CaptureError` for a DTensor and its like."""
    if is_wrapper_subclass(tensor):
        raise CaptureError(
            f"{what}, which is a {type(tensor).__name__} without bytes of its own, and a plan"
            " places bytes. Give the step plain tensors (of a DTensor: .to_local()), or train this"
            " module without offloading"
        )


@dataclass(frozen=True, slots=True)
class Collective:
    """Begins the op together with all other ranks, and waits until it is over."""

    op: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with naming_lost_ranks(None):
            result = self.op(*args, **kwargs)
            if _name(self.op).startswith(FUNCTIONAL):
                for tensor in tensors_of(result):
                    wait_tensor(tensor)
                return result
            if result is not None:
                wait_for_work(result[-1] if isinstance(result, tuple) else result)
        return None


@contextmanager
def naming_lost_ranks(group: Any) -> Iterator[None]:
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
