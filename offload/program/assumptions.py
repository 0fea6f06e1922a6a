"""What a graph assumes about values, because the Python code of its step asked for them.

    if mask.all():     the graph has one of the two branches     assumes: mask.all() is True
    x[mask]            the graph has tensors of a fixed size     assumes: mask has 37 places

Every run checks what is assumed, in tasks of the graph, before anything that outlives the step is
written (lowering/checks_first.py). A check waits for the device, as the step's own code would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.errors import AssumptionFailed

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class Assumption:
    """The answer that a step got when it asked for the value of a tensor."""

    value: Number
    what: str
    """The op that asked."""
    where: str
    """The user's line."""
    own: bool = False
    """Whether neither the batch, nor what is trained, nor a random number decides the value: it
    follows from what the step itself keeps, as the pointer of a queue does."""


@dataclass(frozen=True, slots=True)
class Check:
    """Compares values with what is assumed. It is a kernel, and raises `AssumptionFailed`."""

    first: int
    """The number of its first assumption among all of the step."""
    assumptions: tuple[Assumption, ...]

    def __call__(self, *tensors: torch.Tensor) -> None:
        for number, (assumed, tensor) in enumerate(zip(self.assumptions, tensors, strict=True)):
            found = type(assumed.value)(tensor.item())
            if not same_number(found, assumed.value):
                raise AssumptionFailed(
                    f"{assumed.where}: {assumed.what} gave {assumed.value!r} when the step was"
                    f" captured, and gives {found!r} now",
                    number=self.first + number,
                    found=found,
                    own=assumed.own,
                )


def same_number(one: Number, other: Number) -> bool:
    """Whether two answers are one. A NaN is like any other NaN."""
    return one == other or (one != one and other != other)


def same_start(one: Sequence[Number], other: Sequence[Number]) -> bool:
    """Whether the answers are equal as far as both are known."""
    return all(same_number(a, b) for a, b in zip(one, other, strict=False))
