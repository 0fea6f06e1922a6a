"""torchvision's folder of pictures, with its JPEGs decoded by our decoder where the bits are equal.

    JPEG of a kind that had equal bits 4 times     our decoder, straight into the slot
    of another kind                                both; compared, and Pillow's pixels are served
    of a kind whose bits differed once             the folder's own loader (Pillow)
    anything else, or our decoder refuses it       the folder's own loader (Pillow)

Both decoders are libjpeg-turbo, mostly, but nobody promises the same version, or the same way to
upsample. A kind is what decides of it: the colour space, the subsampling, progressive or not.
Worker processes begin with what was compared here. Pictures are not turned by their EXIF, because
torchvision's loader does not turn them.
"""

import copy
import logging
from io import FileIO
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from loaders.adopting.torchvision_datasets import torchvision_reader
from loaders.adopting.torchvision_steps import torchvision_name
from loaders.adopting.transforms import Decode
from loaders.pixels.decode_counts import DecodeCounts
from loaders.pixels.decoding import Pixels, Room
from loaders.slots.leaves import Picture

log = logging.getLogger(__name__)

EQUAL = 4
"""So many pictures of a kind have the same bits before it is decoded natively."""
PROBES = 8
"""So many pictures are compared when the data set is opened."""
PROGRESSIVE = b"\xff\xc2"

Kind = tuple[str, str, bool]
"""Colour space, subsampling, and whether it is progressive."""


class NativeFolder:
    """The samples of `folder`, an ImageFolder of torchvision with torchvision's loader and a
    transform that we know. Several threads may read it. What is asked of it beside its samples is
    answered by `folder`."""

    def __init__(self, folder: Any, counts: DecodeCounts | None = None) -> None:
        self.folder = folder
        self.counts = counts or DecodeCounts()
        self.equal: dict[Kind, int] = {}
        """How many pictures of a kind had equal bits."""
        self.differing: set[Kind] = set()
        """The kinds of which one had not. No thread that compares at the same time undoes that."""
        steps = folder.transform.steps if folder.transform is not None else ()
        self._steps: tuple[Any, ...] = steps
        self._converts = folder.transform is None or folder.transform.keeps_pixels

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.read_into(index, _anywhere)

    def __getattr__(self, name: str) -> Any:
        if name == "folder":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.folder, name)

    def read_into(self, index: int, room: Room) -> tuple[Any, Any]:
        """Sample `index`, with its pixels in the memory that `room` gives where that saves a
        copy."""
        path, target = self.folder.samples[index]
        pixels = self._native(path, room if self._converts else _anywhere)
        if pixels is None:
            sample = self.folder.loader(path)
            return sample if self.folder.transform is None else self.folder.transform(
                sample
            ), target
        if self._converts:
            return _converted(torch.from_numpy(pixels).permute(2, 0, 1), self._steps), target
        return self.folder.transform(Image.fromarray(pixels)), target

    def compare(self) -> str:
        """Compare a few pictures; returns what to say of it."""
        for index in np.unique(np.linspace(0, len(self) - 1, PROBES).astype(int)).tolist():
            try:
                self._native(self.folder.samples[index][0], _anywhere)
            except Exception as error:  # whoever asks for this sample is told
                log.debug("sample %d is not compared: %s", index, error)
        self.counts.taken()  # these are no samples yet
        kinds = sorted({" ".join(kind[:2]) for kind in self.differing})
        if kinds:
            return f"decoded by Pillow where its bits are others: {', '.join(kinds)} JPEG"
        if not any(self.equal.values()):
            return "decoded by Pillow"
        return "JPEG decoded natively, with Pillow's bits"

    def _native(self, path: str, room: Room) -> Pixels | None:
        """The pixels of a JPEG. None: Pillow has to read it."""
        with FileIO(path) as file:
            data = file.readall()
        if not simplejpeg.is_jpeg(data):
            self.counts.add(_format_of(path), native=False)
            return None
        pixels = self._decoded(path, data, room)
        self.counts.add("JPEG", native=pixels is not None)
        return pixels

    def _decoded(self, path: str, data: bytes, room: Room) -> Pixels | None:
        try:
            tall, wide, space, sampling = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            return None
        height, width = int(tall), int(wide)
        kind: Kind = (str(space), str(sampling), PROGRESSIVE in data)
        equal, limit = self.equal.get(kind, 0), Image.MAX_IMAGE_PIXELS
        if (
            kind in self.differing
            or space in ("CMYK", "YCCK")
            or (limit and height * width > limit)
        ):
            return None
        buffer = room((height, width, 3)) if equal >= EQUAL else _anywhere((height, width, 3))
        try:
            pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=buffer.reshape(-1))
        except ValueError:  # Pillow may know better, or says in its own words what is wrong
            return None
        if equal < EQUAL:
            same = np.array_equal(pixels, np.asarray(self.folder.loader(path)))
            if same:
                self.equal[kind] = equal + 1
            else:
                self.differing.add(kind)
            return None
        return pixels


def decoded_natively(dataset: Any) -> tuple[Any, str]:
    """The data set, or a copy of it that decodes the JPEGs of torchvision's folders natively; and
    what to say of it. Empty: it is no such folder."""
    if type(dataset) is Subset:
        inner, said = decoded_natively(dataset.dataset)
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner
        return dataset, said
    if type(dataset) is ConcatDataset:
        made, said = zip(*map(decoded_natively, dataset.datasets), strict=True)
        if any(said):
            dataset = copy.copy(dataset)
            dataset.datasets = list(made)
        return dataset, "; ".join(dict.fromkeys(filter(None, said)))
    if torchvision_reader(dataset) != "DatasetFolder" or not len(dataset):
        return dataset, ""
    if why := _why_not(dataset):
        return dataset, f"decoded by the data set ({why})"
    native = NativeFolder(dataset)
    return native, native.compare()


def _why_not(folder: Any) -> str:
    """Why a folder of torchvision is left as it is."""
    from torchvision import get_image_backend
    from torchvision.datasets import folder as theirs  # it is imported already, by the data set

    if folder.loader not in (theirs.default_loader, theirs.pil_loader):
        return "its loader is not torchvision's"
    if folder.loader is theirs.default_loader and get_image_backend() != "PIL":
        return f"torchvision reads with {get_image_backend()}"
    if folder.target_transform is not None:
        return "it has a target_transform"
    if folder.transform is not None and not isinstance(folder.transform, Decode):
        return "its transform is not split"
    return ""


def _anywhere(shape: tuple[int, int, int]) -> Pixels:
    return np.empty(shape, np.uint8)


def _converted(pixels: torch.Tensor, steps: tuple[Any, ...]) -> Any:
    """What steps that keep pixels make of the picture of Pillow that has these."""
    made: Any = None  # a picture of Pillow still
    for step in steps:
        if made is not None:
            made = step(made)
        elif torchvision_name(step) == "PILToTensor":
            made = pixels
        elif torchvision_name(step) == "ToImage":
            made = step(pixels)
    if made is not None:
        return made
    picture = pixels.as_subclass(Picture)
    picture.picture_mode = "RGB"
    return picture


def _format_of(path: str) -> str:
    return path.rpartition(".")[2].upper()[:8]
