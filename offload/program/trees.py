"""Tensors in the lists, tuples and dicts that an op takes and returns.

PyTorch's own tree functions know every container that a user may register. Called for every op of a
trace, they take a third of the time. An op only has three kinds of containers.
"""

from collections.abc import Callable
from typing import Any

import torch

from offload.torch_seams import pytree


def leaves(tree: Any) -> list[Any]:
    """All leaves in order. None is a leaf, too."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, list | tuple):
        for branch in tree:
            _collect(branch, found)
    elif isinstance(tree, dict):
        for branch in tree.values():
            _collect(branch, found)
    else:
        found.append(tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree with `change(tensor)` for each tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(branch, change) for branch in tree])
    if kind is dict:
        return {name: mapped(branch, change) for name, branch in tree.items()}
    if isinstance(tree, list | tuple | dict):  # a named tuple, or a subclass
        return pytree.tree_map_only(torch.Tensor, change, tree)
    return tree
