"""Tensors in the lists, tuples and dicts that an op takes and returns.

PyTorch's own tree functions know every container that a user may register. Called for every op of a
trace, they take a third of the time. An op only has three kinds of containers.
"""

from typing import Any

import torch


def leaves(tree: Any) -> list[Any]:
    """All leaves in order. None is a leaf, too."""
    collected: list[Any] = []
    _collect(tree, collected)
    return collected


def _collect(tree: Any, collected: list[Any]) -> None:
    if isinstance(tree, list | tuple):
        for branch in tree:
            _collect(branch, collected)
    elif isinstance(tree, dict):
        for branch in tree.values():
            _collect(branch, collected)
    else:
        collected.append(tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
