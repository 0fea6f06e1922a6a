"""Splits a batch into micro-batches, whose steps several devices can work on at once.

    training_step(batch)    ->   training_step(part 1)
    backward(loss)          ->   backward(loss 1 / 4)
                                 training_step(part 2), backward(loss 2 / 4) ...

All bits are those of plain Lightning that accumulates the gradients of so many smaller batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from offload import OffloadError
from offload.torch_seams import pytree


class MicroBatches:
    """The parts of the present batch."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"micro_batches={count}: give 1 or more")
        self.count = count
        self._parts: list[MicroBatch] = []
        """The present one, which has not gone backward, and those after it."""
        self.whole: Any = None
        """The present batch."""
        self._rest: tuple[Any, ...] = ()
        """What `training_step` takes besides the batch."""

    @property
    def are_left(self) -> bool:
        return bool(self._parts)

    def check_automatic(self) -> None:
        """Raise `OffloadError` for a module that optimizes by hand."""
        if self.count > 1:
            raise OffloadError(
                f"micro_batches={self.count}: this module optimizes by hand, and nobody else knows"
                " where its passes begin: split its batches in its training_step"
            )

    def begin(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Begin a batch, and return the arguments of its first micro-batch."""
        if self.count == 1:
            return args
        self.whole, *rest = args
        self._parts, self._rest = [*split_batch(self.whole, self.count)], (*rest,)
        return self.next()

    def end(self) -> None:
        """Forget the parts that have not run, because an error has ended the step."""
        self._parts, self.whole = [], None

    def next(self) -> tuple[Any, ...]:
        """Return the arguments of the present micro-batch."""
        return (self._parts[0].batch, *self._rest)

    def loss_of(self, made: Any, accumulated: int) -> torch.Tensor:
        """Return the loss of what `training_step` returned, as Lightning's loop does."""
        loss = ClosureResult.from_training_step_output(self.check(made), accumulated).closure_loss
        assert loss is not None
        return loss

    def check(self, made: Any) -> Any:
        """Return what `training_step` has returned. Raise `OffloadError` if a part has no loss."""
        if made is None and self.are_left:
            raise OffloadError(
                f"micro_batches={self.count}: training_step returned no loss for a part of a"
                " batch: return one, or give micro_batches=1"
            )
        return made

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the share of the present micro-batch in the batch's loss. It is over now."""
        return loss / self._parts.pop(0).ratio


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a batch."""

    batch: Any
    ratio: float
    """The whole batch has so many times its samples. Its loss is divided by it."""


def split_batch(batch: Any, count: int) -> Sequence[MicroBatch]:
    """Split the first dimension of all tensors. A batch of fewer samples has fewer parts."""
    leaves, structure = pytree.tree_flatten(batch)
    samples = _count_samples(leaves, count)
    pieces = [leaf.tensor_split(min(count, samples)) for leaf in leaves]
    parts = [[*part] for part in zip(*pieces, strict=True)]
    return [
        MicroBatch(pytree.tree_unflatten(part, structure), samples / len(part[0])) for part in parts
    ]


def _count_samples(leaves: Sequence[Any], count: int) -> int:
    sizes: set[int] = set()
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            what = "a number" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise OffloadError(
                f"micro_batches={count}: the batch has {what}, which cannot be split: give tensors"
                " whose first dimension counts the samples, or accumulate_grad_batches instead"
            )
        sizes.add(len(leaf))
    if len(sizes) != 1 or 0 in sizes:
        raise OffloadError(
            f"micro_batches={count}: the batch's tensors have {sorted(sizes)} samples, so they"
            " cannot be split alike: give as many in each, or accumulate_grad_batches instead"
        )
    return sizes.pop()
