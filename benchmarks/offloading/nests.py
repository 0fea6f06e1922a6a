"""A nest of dicts, lists and tuples, leaf by leaf."""

from collections.abc import Iterator
from typing import Any

import torch


def named_leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path; tensors are copied."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(f"{path}.{key}", value)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from named_leaves(f"{path}[{number}]", value)
    else:
        yield path, tree.clone() if isinstance(tree, torch.Tensor) else tree
