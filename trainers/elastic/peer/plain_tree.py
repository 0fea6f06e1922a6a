"""A checkpoint as JSON and raw tensors. Nothing is pickled, so nothing that comes runs code.

{"a": tensor, "b": (1, 2.5)}  ->  {"dict": [["a", {"tensor": 0}], ["b", {"tuple": [1, 2.5]}]]}
                                  and the tensors, in their order
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.elastic.errors import CannotBeElastic


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """Return JSON for `value`, and copies of its tensors in host memory."""
    tensors: list[Tensor] = []
    return _plain(value, tensors, ""), tensors


def put_together(plain: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `take_apart` was given."""
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    match kind:
        case "dict":
            return {put_together(k, tensors): put_together(v, tensors) for k, v in inner}
        case "list":
            return [put_together(one, tensors) for one in inner]
        case "tuple":
            return tuple(put_together(one, tensors) for one in inner)
        case "set":
            return {put_together(one, tensors) for one in inner}
        case "tensor":
            return tensors[inner]
        case "array":
            return tensors[inner].numpy()
        case "float":
            return float(inner)
        case "path":
            return Path(inner)
        case "dtype" if isinstance(dtype := getattr(torch, inner, None), torch.dtype):
            return dtype
        case "size":
            return torch.Size(inner)
        case _:
            raise CannotBeElastic(f"a state has a part of the unknown kind {kind!r}")


def _plain(value: Any, tensors: list[Tensor], where: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return _plain(value.item(), tensors, where)
        case int():
            return int(value)
        case float():
            return float(value) if np.isfinite(value) else {"float": repr(float(value))}
        case torch.Size():
            return {"size": list(value)}
        case dict():
            return {
                "dict": [
                    [_plain(k, tensors, where), _plain(v, tensors, f"{where}.{k}")]
                    for k, v in value.items()
                ]
            }
        case list():
            return {"list": [_plain(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
        case tuple():
            return {"tuple": [_plain(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
        case set() | frozenset():
            return {"set": [_plain(v, tensors, where) for v in value]}
        case Tensor():
            tensors.append(value.detach().to("cpu", copy=True).contiguous())
            return {"tensor": len(tensors) - 1}
        case np.ndarray():
            tensors.append(torch.from_numpy(value.copy()))
            return {"array": len(tensors) - 1}
        case Path():
            return {"path": str(value)}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case _:
            raise CannotBeElastic(
                f"a newcomer needs the state at {where or 'its root'}, and it is a"
                f" {type(value).__name__}, which cannot be sent as plain values and tensors: keep"
                " numbers, texts, lists, dicts and tensors in state_dict()"
            )
