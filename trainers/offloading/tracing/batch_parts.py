"""A batch, taken apart: tensors become the arguments of a step, all else is a part of its key."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload import CaptureError
from offload.torch_seams import pytree
from trainers.offloading.tracing.batch_texts import BatchText

PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class BatchParts:
    """A batch, taken apart into tensors, texts and constants."""

    tensors: tuple[torch.Tensor, ...]
    key: tuple[Any, ...]
    """Two batches with equal keys can be served by one graph."""
    leaves: tuple[Any, ...]
    spec: Any
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: Any) -> "BatchParts":
        leaves, spec = pytree.tree_flatten(batch)
        leaves = [_MappingBatch.of(leaf) if isinstance(leaf, Mapping) else leaf for leaf in leaves]
        tensors = [tensor for leaf in leaves for tensor in _tensors(leaf)]
        key = (spec, *(_leaf_key(leaf) for leaf in leaves))
        texts = [text for leaf in leaves for text in _texts(leaf)]
        return cls(tuple(tensors), key, tuple(leaves), spec, tuple(texts))

    @property
    def given(self) -> tuple[Any, ...]:
        """The items of the batch that the step may return unchanged."""
        return (*self.tensors, *self.texts)

    @property
    def loose(self) -> "BatchParts":
        """The same parts with stand-ins for the texts, for a step that does not read them. Without
        texts this is the object itself."""
        if not self.texts:
            return self
        leaves = tuple(map(_loose, self.leaves))
        return replace(self, leaves=leaves, key=(self.spec, *map(_leaf_key, leaves)))

    def rebuilt(self, tensors: Iterable[torch.Tensor], texts: Iterable[BatchText] = ()) -> Any:
        """Return the batch with these tensors, and with `texts` in place of the stand-ins."""
        new, said = iter(tensors), iter(texts)
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


def _texts(leaf: Any) -> tuple[str, ...]:
    if isinstance(leaf, _MappingBatch):
        return leaf.inside.texts
    return (leaf,) if isinstance(leaf, str) else ()


def _loose(leaf: Any) -> Any:
    if isinstance(leaf, _MappingBatch):
        return replace(leaf, inside=leaf.inside.loose)
    return BatchText() if isinstance(leaf, str) else leaf


def _rebuilt(leaf: Any, new: Iterator[torch.Tensor], said: Iterator[BatchText]) -> Any:
    if isinstance(leaf, _MappingBatch):
        return leaf.kind(leaf.inside.rebuilt(new, said))
    if type(leaf) is BatchText:
        return next(said)
    return next(new) if isinstance(leaf, torch.Tensor) else leaf


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, _MappingBatch):
        return (leaf.kind, leaf.inside.key)
    if type(leaf) is BatchText:
        return (str,)
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad)
    if not isinstance(leaf, PLAIN):
        raise CaptureError(
            f"the batch holds a {type(leaf).__name__}, but a planned step takes only tensors,"
            " numbers and text in dicts, lists and tuples. Return these from the data set"
            " (or collate_fn)"
        )
    return (type(leaf), leaf)
