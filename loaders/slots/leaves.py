"""A sample is any nest of tuples, lists and dicts. Its leaves are stored, and its nest is kept.

    (picture, {"label": 3, "name": "a"})  ->  leaves [picture, 3, "a"]  ->  columns of a batch

Tensors, arrays, pictures and numbers are stored as arrays. Where a user's own code wants one sample
at a time, they come back as what they were. Anything else (strings, None, ...) stays an object.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from loaders.pixels.picture_modes import as_rgb
from loaders.torch_seams import plain_results

# A sample is whatever the user's data set returns: only its leaves have types here.
Sample = Any
Leaf = torch.Tensor | object


class Picture(torch.Tensor):
    """The pixels of a former PIL picture, as `as_tensor` arranges them, and the picture's mode."""

    picture_mode: str
    # The result of any operation on it is a plain tensor.
    __torch_function__ = plain_results  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The samples that were read for a list of ids."""

    samples: list[Sample]
    """The samples in the order of the ids, up to the first unreadable one. They may lie in memory
    that the next read overwrites."""
    error: BaseException | None = None
    """The exception that reading `ids[len(samples)]` raised. The ids behind it were not read."""


Fetch = Callable[[Sequence[int]], Chunk]

PLAIN_PICTURES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F")
"""The modes of Pillow in which an array of pixels is the whole picture. Others (palettes, bits) are
stored as RGB."""


@dataclass(frozen=True, slots=True)
class Nest:
    """The nest of a sample, which puts its leaves together again."""

    template: Sample

    def leaves(self, nested: Any) -> list[Any]:
        """The leaves of a sample or a batch with this nest. A leaf of a batch may be a list."""
        return _leaves(self.template, nested)

    def batch(self, columns: Sequence[Any]) -> Any:
        """A batch of these columns, nested as torch's default collate does: a namedtuple stays one,
        a tuple becomes a list."""
        return _build(self.template, iter(columns), exact=False)

    def sample(self, leaves: Sequence[Any]) -> Any:
        """A sample of these leaves, nested as the data set did."""
        return _build(self.template, iter(leaves), exact=True)


def leaves_of(sample: Sample) -> list[Any]:
    if isinstance(sample, dict):
        # Two samples may list their keys in different orders.
        return [leaf for key in _keys(sample) for leaf in leaves_of(sample[key])]
    if isinstance(sample, tuple | list):
        return [leaf for part in sample for leaf in leaves_of(part)]
    return [sample]


def structure_of(sample: Sample) -> object:
    """What is equal for two samples exactly if they are nested alike."""
    if isinstance(sample, dict):
        keys = _keys(sample)
        return (*keys, tuple(structure_of(sample[key]) for key in keys))
    if isinstance(sample, tuple | list):
        return tuple(structure_of(part) for part in sample)
    return None


def as_tensor(leaf: Any) -> Leaf:
    """The tensor that a leaf is stored as. A leaf without numbers is returned as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if isinstance(leaf, Image.Image):
        plain = leaf if leaf.mode in PLAIN_PICTURES else as_rgb(leaf)
        pixels = torch.from_numpy(np.array(plain))
        return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels[None]
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        return torch.as_tensor(leaf)
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64)
    if type(leaf) in (bool, int):
        return torch.tensor(leaf)
    return leaf


def as_stored(leaf: Any) -> Leaf:
    """A leaf as the cache keeps it: arrays become tensors, plain values stay as they are."""
    return leaf if type(leaf) in (int, float, bool, str) else as_tensor(leaf)


def like(template: Any, stored: torch.Tensor) -> Any:
    """The tensor `stored` as an object of the type of `template`. It must own its memory."""
    if isinstance(template, Image.Image):
        return _as_picture(stored, template.mode if template.mode in PLAIN_PICTURES else "RGB")
    if isinstance(template, np.ndarray):
        return stored.numpy()
    if isinstance(template, np.generic):
        return stored.numpy()[()]
    return stored if isinstance(template, torch.Tensor) else stored.item()


def own(sample: Sample) -> Sample:
    """A copy of the sample in memory of its own, as the data set returned it."""
    return Nest(sample).sample([_own_leaf(leaf) for leaf in leaves_of(sample)])


def _own_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Picture):
        return _as_picture(leaf.clone(), leaf.picture_mode)
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _as_picture(pixels: torch.Tensor, mode: str) -> Image.Image:
    rows = pixels.permute(1, 2, 0) if len(pixels) > 1 else pixels[0]
    picture = Image.fromarray(rows.numpy())
    return (
        picture
        if picture.mode == mode
        else Image.frombytes(mode, picture.size, rows.numpy().tobytes())
    )


def _leaves(template: Sample, nested: Any) -> list[Any]:
    if isinstance(template, dict):
        keys = _keys(template)
        return [leaf for key in keys for leaf in _leaves(template[key], nested[key])]
    if isinstance(template, tuple | list):
        parts = zip(template, nested, strict=True)
        return [leaf for part in parts for leaf in _leaves(*part)]
    return [nested]


def _build(template: Sample, values: Any, exact: bool) -> Any:
    if isinstance(template, dict):
        by_key = {key: _build(template[key], values, exact) for key in _keys(template)}
        return {key: by_key[key] for key in template}
    if isinstance(template, tuple | list):
        parts = [_build(part, values, exact) for part in template]
        if hasattr(template, "_fields"):
            return type(template)(*parts)
        return tuple(parts) if exact and isinstance(template, tuple) else parts
    return next(values)


def _keys(sample: dict[Any, Any]) -> list[Any]:
    return sorted(sample, key=repr)
