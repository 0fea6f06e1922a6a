"""What an op is given and gives back: tensors in lists, tuples and dicts.

PyTorch's own tree functions know every container that a user may register; at every op of a trace
that takes a third of the time. An op has three kinds of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def leaves(tree: Any) -> list[Any]:
    """In order; None is one."""
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
    """The same tree with something else for each tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(branch, change) for branch in tree])
    if kind is dict:
        return {name: mapped(branch, change) for name, branch in tree.items()}
    if isinstance(tree, list | tuple | dict):  # with names, or somebody's own
        return pytree.tree_map_only(torch.Tensor, change, tree)
    return tree
