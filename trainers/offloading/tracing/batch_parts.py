"""A batch, taken apart: tensors become the arguments of a step, all else is a part of its key."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from offload import CaptureError
from offload.torch_seams import pytree
from trainers.offloading.tracing.batch_changes import Container, containers_of
from trainers.offloading.tracing.batch_texts import BatchId, BatchText, Name

Captured = TypeVar("Captured")
TEXTS = 3
"""A step that reads the text of its batches is captured for so many texts."""
PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class BatchParts:
    """A batch, taken apart into tensors, names and constants."""

    tensors: tuple[torch.Tensor, ...]
    key: tuple[Any, ...]
    """Two batches with equal keys can be served by one graph."""
    leaves: tuple[Any, ...]
    spec: Any
    names: tuple[str | int, ...] = ()
    """Its texts and whole numbers."""
    containers: tuple[Container, ...] = ()
    """Its dicts and lists, which the step may change."""

    @classmethod
    def of(cls, batch: Any) -> "BatchParts":
        leaves, spec = pytree.tree_flatten(batch)
        leaves = [_MappingBatch.of(leaf) if isinstance(leaf, Mapping) else leaf for leaf in leaves]
        tensors = [tensor for leaf in leaves for tensor in _tensors(leaf)]
        key = (spec, *(_leaf_key(leaf) for leaf in leaves))
        names = [name for leaf in leaves for name in _names(leaf)]
        containers = tuple(containers_of(batch))
        return cls(tuple(tensors), key, tuple(leaves), spec, tuple(names), containers)

    @property
    def given(self) -> tuple[Any, ...]:
        """The items of the batch that the step may return unchanged, then what it may change."""
        return (*self.tensors, *self.names, *self.containers)

    @property
    def loose(self) -> "BatchParts":
        """The same parts with stand-ins for the names, for a step that does not read them. Without
        names this is the object itself."""
        if not self.names:
            return self
        leaves = tuple(map(_loose, self.leaves))
        return replace(self, leaves=leaves, key=(self.spec, *map(_leaf_key, leaves)))

    def rebuilt(self, tensors: Iterable[torch.Tensor], names: Iterable[Name] = ()) -> Any:
        """Return the batch with these tensors, and with `names` in place of the stand-ins."""
        new, said = iter(tensors), iter(names)
        leaves = [_rebuilt(leaf, new, said) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True, eq=False)
class _MappingBatch:
    """A mapping of another type than dict, such as transformers' BatchEncoding. It is rebuilt from
    a dict, as Lightning does when it moves a batch."""

    kind: Any
    inside: BatchParts

    @classmethod
    def of(cls, mapping: Mapping[Any, Any]) -> "_MappingBatch":
        made: Any = type(mapping)
        inside = dict(mapping)
        if _beside(made(inside)) != _beside(mapping):
            raise CaptureError(
                f"the batch holds a {made.__name__} with attributes besides its items, which"
                " would be lost when it is rebuilt. Return a dict from the data set"
                " (or collate_fn)"
            )
        return cls(made, BatchParts.of(inside))


def _beside(mapping: Any) -> dict[str, Any]:
    return {name: own for name, own in vars(mapping).items() if not isinstance(own, Mapping)}


def _tensors(leaf: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(leaf, _MappingBatch):
        return leaf.inside.tensors
    return (leaf,) if isinstance(leaf, torch.Tensor) else ()


def _names(leaf: Any) -> tuple[str | int, ...]:
    if isinstance(leaf, _MappingBatch):
        return leaf.inside.names
    return (leaf,) if isinstance(leaf, str) or type(leaf) is int else ()


def _loose(leaf: Any) -> Any:
    if isinstance(leaf, _MappingBatch):
        return replace(leaf, inside=leaf.inside.loose)
    if isinstance(leaf, str):
        return BatchText()
    return BatchId() if type(leaf) is int else leaf


def _rebuilt(leaf: Any, new: Iterator[torch.Tensor], said: Iterator[Name]) -> Any:
    if isinstance(leaf, _MappingBatch):
        return leaf.kind(leaf.inside.rebuilt(new, said))
    if isinstance(leaf, BatchText | BatchId):
        return next(said)
    return next(new) if isinstance(leaf, torch.Tensor) else leaf


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, _MappingBatch):
        return (leaf.kind, leaf.inside.key)
    if isinstance(leaf, BatchText | BatchId):
        return (str if isinstance(leaf, BatchText) else int,)
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad)
    if not isinstance(leaf, PLAIN):
        raise CaptureError(
            f"the batch holds a {type(leaf).__name__}, but a planned step takes only tensors,"
            " numbers and text in dicts, lists and tuples. Return these from the data set"
            " (or collate_fn)"
        )
    return (type(leaf), leaf)


class NamesRead:
    """Whether the steps of one kind read the names in their batches. Most only return them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._read = False
        self._texts = 0

    def of(self, batch: BatchParts) -> BatchParts:
        """Return the batch as the step reads it."""
        return batch if self._read else batch.loose

    def capture(self, batch: BatchParts, make: Callable[[BatchParts], Captured]) -> Captured:
        """Capture a step by `make`: for any names, or for these if it reads them."""
        if not self._read and batch.names:
            try:
                return make(batch.loose)
            except CaptureError:
                self._read = True
        self._texts += any(isinstance(name, str) for name in batch.names)
        if self._texts > TEXTS:
            raise CaptureError(
                f"{self._kind} reads the text of the batch, which differs from batch to batch."
                " Only return the text, or give numbers in its place"
            )
        return make(batch)
