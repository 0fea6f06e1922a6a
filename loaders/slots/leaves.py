"""A sample is any nest of tuples, lists and dicts. Its leaves are stored, and its nest is kept.

    (picture, {"label": 3, "name": "a"})  ->  leaves [picture, 3, "a"]  ->  columns of a batch

Tensors, arrays, pictures and numbers are stored as arrays. For code of the user's that takes single
samples they are restored: the class of a tensor, its attributes, pictures of Pillow. Other leaves
(strings, None, ...) stay objects, and every serve gets its own copy.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import PackedSequence

from loaders.errors import CacheError, LoaderError, SampleShapeError
from loaders.pixels.decoding import as_rgb
from loaders.torch_seams import plain_results

# A sample is whatever the user's data set returns: only its leaves have types here.
Sample = Any
Leaf = torch.Tensor | object


class Picture(torch.Tensor):
    """The pixels of a PIL picture, as `as_tensor` arranges them, and the mode of the picture."""

    picture_mode: str
    # The result of any operation on it is a plain tensor.
    __torch_function__ = plain_results  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The samples that were read for a list of ids."""

    samples: Sequence[Sample]
    """In the order of the ids, up to the first unreadable one, until the next read."""
    error: BaseException | None = None
    """The exception that reading `ids[len(samples)]` raised. Later ids were not read."""


Fetch = Callable[[Sequence[int], Sequence[int], bool], Chunk]
"""Reads samples by their ids. A worker process draws random numbers for each from its key."""

PLAIN_PICTURES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F")
"""The modes of Pillow in which an array of pixels is the whole picture. Others (palettes, bits,
grey with transparency) are stored as RGB, and cannot be restored."""


NOT_PICTURES = frozenset({"BoundingBoxes", "KeyPoints", "Mask"})
"""Classes of torchvision's tensors that hold places in a picture."""
DISPATCH = "__torch_dispatch__"  # a class that overrides it may hold no memory of its own
NEVER_CHANGED = (str, bytes, int, float, complex, type(None))


@dataclass(frozen=True, slots=True)
class Nest:
    """The nest of a sample, which takes it apart and builds it again."""

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
    if isinstance(sample, PackedSequence):
        raise SampleShapeError(
            "a part of a sample is a PackedSequence, which torch cannot put into a batch either:"
            " let the data set return its sequence, and pack batches in a collate function"
        )
    if isinstance(sample, Mapping):
        # Two samples may list their keys in different orders.
        return [leaf for key in _keys(sample) for leaf in leaves_of(sample[key])]
    if isinstance(sample, tuple | list):
        return [leaf for part in sample for leaf in leaves_of(part)]
    return [sample]


def places_of(sample: Sample, where: str = "") -> list[str]:
    """Where each leaf is in the sample, in the order of `leaves_of`: as [1]['boxes']."""
    if isinstance(sample, Mapping):
        return [p for key in _keys(sample) for p in places_of(sample[key], f"{where}[{key!r}]")]
    if isinstance(sample, tuple | list):
        return [p for n, part in enumerate(sample) for p in places_of(part, f"{where}[{n}]")]
    return [where]


def picture_number(sample: Sample) -> int | None:
    """The number of the leaf that is the picture: the first array with two dimensions or more that
    is no mask, boxes or key points of torchvision's. None: there is none."""
    leaves = leaves_of(sample)
    for number in _flat(Nest(sample).sample(range(len(leaves)))):
        value = as_tensor(leaves[number])
        places = is_tv_tensor(type(value)) and type(value).__name__ in NOT_PICTURES
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and not places:
            return number
    return None


def structure_of(sample: Sample) -> object:
    """A value that is equal for two samples exactly if they are nested alike."""
    if isinstance(sample, Mapping):
        keys = _keys(sample)
        return (*keys, tuple(structure_of(sample[key]) for key in keys))
    if isinstance(sample, tuple | list):
        return tuple(structure_of(part) for part in sample)
    return None


def as_tensor(leaf: Any) -> Leaf:
    """The tensor that a leaf is stored as. A leaf without numbers is returned as it is."""
    if isinstance(leaf, torch.Tensor):
        return _plain(leaf)
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


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor as plain memory. Tensors that are not plain memory are refused."""
    kind_of(leaf)
    if leaf.layout is not torch.strided or leaf.is_nested:
        how = f"of the layout {leaf.layout}"
    elif leaf.is_quantized or leaf.is_meta:
        how = f"quantized ({leaf.dtype})" if leaf.is_quantized else "on the device meta"
    elif leaf.requires_grad:
        how = "with requires_grad=True, whose graph would end in the buffer"
    else:
        plain = leaf.detach()
        return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
    raise SampleShapeError(
        f"a part of a sample is a tensor {how}, and only plain tensors are kept for a batch: let"
        " the data set return a plain one, as x.detach() or x.to_dense() is"
    )


def holds_numbers(leaf: Any) -> bool:
    """Whether `as_tensor` makes a tensor of a leaf."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufc"
    return isinstance(leaf, torch.Tensor | Image.Image) or type(leaf) in (bool, int, float)


def nesting_error(sample: Sample, sample_id: int, template: Sample) -> SampleShapeError:
    """The error for a sample that makes no batch with one like `template`."""
    if sample is None:
        return SampleShapeError(
            f"sample {sample_id} is None, and a batch has a row of each sample: give a collate"
            ' function, which gets the None; or raise an error in [i], and give on_error="skip"'
        )
    there, first = places_of(sample), places_of(template)
    lacks = [f"it lacks {place}" for place in first if place not in there]
    more = [f"the first one lacks {place}" for place in there if place not in first]
    how = "; ".join([*lacks, *more])
    how = how or f"parts {structure_of(sample)}, not {structure_of(template)}"
    return SampleShapeError(
        f"sample {sample_id} is nested otherwise than the first one ({how}): give a collate"
        " function, which gets samples as they are, or nest every sample alike"
    )


def as_stored(leaf: Any) -> Leaf:
    """A leaf as the cache keeps it: arrays become tensors, plain values stay as they are."""
    if kind_of(leaf) is not None and attributes_of(leaf):
        raise CacheError(
            f"a part of a sample is a {type(leaf).__name__} with attributes"
            f" ({', '.join(attributes_of(leaf))}), which the decoded cache does not keep: leave the"
            " cache off, or return a plain tensor and these values beside it"
        )
    return leaf if type(leaf) in (int, float, bool, str) else as_tensor(leaf)


def mode_of(leaf: Any) -> str | None:
    """The mode of a picture of Pillow, also of one that is stored. None: it is no picture."""
    if isinstance(leaf, Picture):
        return leaf.picture_mode
    return leaf.mode if isinstance(leaf, Image.Image) else None


def restored(template: Any, stored: torch.Tensor, mode: str | None) -> Any:
    """The tensor `stored` as an object of the type of `template`; a picture of Pillow in its own
    `mode`. It must own its memory."""
    if mode is not None:
        if mode not in PLAIN_PICTURES:
            raise SampleShapeError(
                f"a picture of Pillow's mode {mode!r} is stored as RGB, so nobody can get it as it"
                ' was: let the data set convert it, as with convert("RGB")'
            )
        return _as_picture(stored, mode)
    if isinstance(template, np.ndarray):
        return stored.numpy()
    if isinstance(template, np.generic):
        return stored.numpy()[()]
    return stored if isinstance(template, torch.Tensor) else stored.item()


def kind_of(leaf: Any) -> type[torch.Tensor] | None:
    """The user's subclass of torch.Tensor that a leaf is. None: it is no such tensor."""
    kind = type(leaf)
    if kind is torch.Tensor or kind is Picture or not isinstance(leaf, torch.Tensor):
        return None
    if getattr(kind, DISPATCH) is not getattr(torch.Tensor, DISPATCH):
        raise SampleShapeError(
            f"a part of a sample is a {kind.__name__}, whose memory is not that of one tensor, so"
            " it cannot be stored and given back: return plain tensors"
        )
    return kind


def attributes_of(leaf: Any) -> dict[str, Any]:
    """The attributes of a tensor of a subclass."""
    return getattr(leaf, "__dict__", {})


def as_kind(
    stored: torch.Tensor, kind: type[torch.Tensor] | None, attributes: dict[str, Any]
) -> torch.Tensor:
    """`stored` as a tensor of this subclass, with copies of these attributes."""
    if kind is None:
        return stored
    made = stored if type(stored) is kind else stored.as_subclass(kind)
    vars(made).update(copy_object(attributes))
    return made


def is_tv_tensor(kind: type | None) -> bool:
    return kind is not None and f"{kind.__module__}.".startswith("torchvision.tv_tensors.")


def copy_object(thing: Any) -> Any:
    """A copy for one serve: its changes do not reach other serves."""
    if isinstance(thing, NEVER_CHANGED):
        return thing
    try:
        return copy.deepcopy(thing)
    except Exception as error:
        raise LoaderError(
            f"a part of a sample is a {type(thing).__name__} and cannot be copied for each serve:"
            f" {error}; give it a __deepcopy__, or leave it out of the sample"
        ) from error


def change_leaves(sample: Sample, change: Callable[[Any], Any]) -> Sample:
    """The same nest of tuples, lists and dicts, with every leaf replaced by `change(leaf)`."""
    return Nest(sample).sample([change(leaf) for leaf in leaves_of(sample)])


def copy_sample(sample: Sample) -> Sample:
    """A copy of the sample in its own memory, as the data set returned it."""
    return change_leaves(sample, _copy_leaf)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Picture):
        if leaf.picture_mode in PLAIN_PICTURES:
            return _as_picture(leaf.clone(), leaf.picture_mode)
        kept = leaf.clone().as_subclass(Picture)
        kept.picture_mode = leaf.picture_mode
        return kept
    if not isinstance(leaf, torch.Tensor):
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    kind = kind_of(leaf)
    return as_kind(leaf.clone(), kind, attributes_of(leaf))


def _flat(nested: Any) -> list[int]:
    """The numbers in a nest of numbers, in the order in which its dicts list their keys."""
    if isinstance(nested, Mapping | tuple | list):
        inside = nested.values() if isinstance(nested, Mapping) else nested
        return [number for part in inside for number in _flat(part)]
    return [nested]


def _as_picture(pixels: torch.Tensor, mode: str) -> Image.Image:
    rows = pixels.permute(1, 2, 0) if len(pixels) > 1 else pixels[0]
    picture = Image.fromarray(rows.numpy())
    if picture.mode == mode:
        return picture
    return Image.frombytes(mode, picture.size, rows.numpy().tobytes())


def _leaves(template: Sample, nested: Any) -> list[Any]:
    if isinstance(template, Mapping):
        keys = _keys(template)
        return [leaf for key in keys for leaf in _leaves(template[key], nested[key])]
    if isinstance(template, tuple | list):
        parts = zip(template, nested, strict=True)
        return [leaf for part in parts for leaf in _leaves(*part)]
    return [nested]


def _build(template: Sample, values: Any, exact: bool) -> Any:
    if isinstance(template, Mapping):
        by_key = {key: _build(template[key], values, exact) for key in _keys(template)}
        return like_mapping(template, {key: by_key[key] for key in template})
    if isinstance(template, tuple | list):
        parts = [_build(part, values, exact) for part in template]
        if hasattr(template, "_fields"):
            return type(template)(*parts)
        return tuple(parts) if exact and isinstance(template, tuple) else parts
    return next(values)


def like_mapping(template: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """A mapping of the class of `template` with its other attributes, as torch's collate makes."""
    if type(template) is dict:
        return made
    try:
        if not isinstance(template, MutableMapping):
            return cast(Any, type(template))(made)
        clone = copy.copy(template)
        clone.update(made)
        return clone
    except TypeError:  # it cannot be copied, or made of a dict
        return made


def _keys(sample: Mapping[Any, Any]) -> list[Any]:
    return sorted(sample, key=repr)
