"""torchvision's folder of pictures, with its JPEGs decoded straight into the slots.

    JPEG                                  our decoder: Pillow's libjpeg, so Pillow's bits
    Resize at the beginning               resized by us, with Pillow's bits (`pixels/resizing.py`)
    anything else, or it is refused       the folder's own loader (Pillow), and all of its transform

EXIF turns no picture, as with torchvision. With decode="scaled", a JPEG is decoded at 1, 2 or 4
eighths where every crop still has as many pixels as it is fitted to: quicker, in other bits.
"""

import copy
from dataclasses import dataclass
from io import FileIO
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from loaders.adopting.torchvision_steps import resizing_of, torchvision_name, torchvision_reader
from loaders.adopting.transforms import Decode
from loaders.pixels.jpegs import ANYWHERE, DecodeCounts, Jpeg, Pixels, Room, decodes_jpegs, is_jpeg
from loaders.pixels.resizing import resizes
from loaders.slots.leaves import Picture

Decoding = Literal["exact", "scaled"]


@dataclass(frozen=True, slots=True)
class ScaledDecoding:
    """A data set that was given with decode="scaled"."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class NativeFolder:
    """The samples of `folder`, an ImageFolder with torchvision's loader and a transform that we
    know. Several threads may read it. All other attributes are those of `folder`."""

    def __init__(
        self, folder: Any, counts: DecodeCounts | None = None, scaled: bool = False
    ) -> None:
        self.folder = folder
        self.scaled = scaled
        self.counts = counts or DecodeCounts()
        steps: tuple[Any, ...] = folder.transform.steps if folder.transform is not None else ()
        self.resizing = resizing_of(steps[0]) if steps and resizes() else None
        self._steps = steps[1:] if self.resizing else steps
        self._converts = Decode(self._steps).keeps_pixels

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.read_into(index, ANYWHERE)

    def __getattr__(self, name: str) -> Any:
        if name == "folder":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.folder, name)

    def read_into(self, index: int, room: Room) -> tuple[Any, Any]:
        """Sample `index`, with its pixels in the memory of `room` where that saves a copy."""
        path, target = self.folder.samples[index]
        pixels = self._native(path, room if self._converts else ANYWHERE)
        if pixels is None:
            sample = self.folder.loader(path)
            transform = self.folder.transform
            return sample if transform is None else transform(sample), target
        if self._converts:
            return _convert(torch.from_numpy(pixels).permute(2, 0, 1), self._steps), target
        return Decode(self._steps)(Image.fromarray(pixels)), target

    def _native(self, path: str, room: Room) -> Pixels | None:
        """The pixels of a JPEG. None: Pillow has to read it."""
        with FileIO(path) as file:
            data = file.readall()
        if not is_jpeg(data):
            self.counts.add(path.rpartition(".")[2].upper()[:8], native=False)
            return None
        pixels, eighths = self._decode(data, room)
        kind = "JPEG" if eighths == 8 else f"JPEG at 1/{8 // eighths}"
        self.counts.add(kind, native=pixels is not None)
        return pixels

    def _decode(self, data: bytes, room: Room) -> tuple[Pixels | None, int]:
        """The pixels, and at how many eighths of the size they were decoded."""
        resizing, eighths = self.resizing, 8
        try:
            with Jpeg(data) as jpeg:
                whole = jpeg.height, jpeg.width
                limit = Image.MAX_IMAGE_PIXELS
                if jpeg.printed or (limit and whole[0] * whole[1] > limit):
                    return None, 8
                if resizing is not None:
                    as_pillow = resizing.begins_with_columns(*whole)
                    return resizing.decoded(jpeg, room) if as_pillow else None, 8
                if self.scaled and room.crops:
                    eighths = room.crops.eighths(*whole)
                return jpeg.decode(room, eighths), eighths
        except ValueError:  # Pillow may decode it, or has a better error
            return None, 8


def decoded_natively(dataset: Any, scaled: bool = False) -> tuple[Any, str]:
    """The data set, or a copy of it that decodes the JPEGs of torchvision's folders natively; and
    the report of that. Empty: it is no such folder. `scaled`: whether they may be decoded smaller,
    for which it must be one folder, or a Subset of one."""
    if type(dataset) is Subset:
        inner, report = decoded_natively(dataset.dataset, scaled)
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner
        return dataset, report
    if type(dataset) is ConcatDataset:
        made, reports = zip(*map(decoded_natively, dataset.datasets), strict=True)
        if any(reports):
            dataset = copy.copy(dataset)
            dataset.datasets = list(made)
        return dataset, "; ".join(dict.fromkeys(filter(None, reports)))
    if torchvision_reader(dataset) != "DatasetFolder" or not len(dataset):
        return dataset, ""
    if why := _why_not(dataset):
        return dataset, f"decoded by the data set ({why})"
    folder = NativeFolder(dataset, scaled=scaled)
    if scaled:
        how = "smaller where every crop stays large enough (not Pillow's bits); others whole"
        return folder, f"JPEG decoded natively, {how}"
    what = "decoded and resized" if folder.resizing else "decoded"
    return folder, f"JPEG {what} natively, with Pillow's bits"


def _why_not(folder: Any) -> str:
    """Why a folder of torchvision is left as it is."""
    if not decodes_jpegs():
        return "our decoder was not compiled here"
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


def _convert(pixels: torch.Tensor, steps: tuple[Any, ...]) -> Any:
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
